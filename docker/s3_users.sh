# Users of the store with the rights that they need: the service s3-users of compose.yaml runs it at every start.
set -eu

policy() { # NAME FOLDER: all about the objects below one folder, and their list
  cat > "/tmp/$1.json" <<END
{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"],
   "Resource": ["arn:aws:s3:::rlhf"]},
  {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
   "Resource": ["arn:aws:s3:::rlhf/$2/*"]}
]}
END
  mc admin policy create store "$1" "/tmp/$1.json"
}

user() { # KEY SECRET POLICY; attached anew, since what is attached already is an error
  mc admin user add store "$1" "$2"
  mc admin policy detach store "$3" --user "$1" || true
  mc admin policy attach store "$3" --user "$1"
}

mc mb --ignore-existing store/rlhf
policy rlhf-stages dvc
policy rlhf-mlflow mlflow
user "$S3_STAGE_ACCESS_KEY" "$S3_STAGE_SECRET_KEY" rlhf-stages
user "$S3_MLFLOW_ACCESS_KEY" "$S3_MLFLOW_SECRET_KEY" rlhf-mlflow
