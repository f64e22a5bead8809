# The store, started: its users from the keys in its environment, then SeaweedFS. Only the S3 port is open; what the
# parts of SeaweedFS ask each other stays on the loopback, and the one internal port that cannot stay there asks for
# the certificate of tasks/deployment/store_setup.py.
set -eu
export WEED_GRPC_CA=/run/store/cert.pem
for part in MASTER VOLUME FILER S3 CLIENT; do
  export "WEED_GRPC_${part}_CERT=/run/store/cert.pem" "WEED_GRPC_${part}_KEY=/run/store/key.pem"
done

user() { # NAME KEY SECRET ACTION...
  printf '{"name": "%s", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": [' "$1" "$2" "$3"
  shift 3
  separator=
  for action in "$@"; do
    printf '%s"%s"' "$separator" "$action"
    separator=', '
  done
  printf ']}'
}

umask 077
{
  printf '{"identities": ['
  user root "$S3_ACCESS_KEY" "$S3_SECRET_KEY" Admin
  printf ', '
  user stages "$S3_STAGE_ACCESS_KEY" "$S3_STAGE_SECRET_KEY" Read:rlhf Write:rlhf List:rlhf
  printf ', '
  user mlflow "$S3_MLFLOW_ACCESS_KEY" "$S3_MLFLOW_SECRET_KEY" Read:rlhf-mlflow Write:rlhf-mlflow List:rlhf-mlflow
  printf ']}\n'
} > /tmp/users.json

exec weed server -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 -filer -master.telemetry=false \
  -master.volumeSizeLimitMB=1024 -volume.max=0 -s3 -s3.ip.bind=0.0.0.0 -s3.port=9000 -s3.config=/tmp/users.json \
  -s3.iam=false -s3.allowDeleteBucketNotEmpty=false -s3.port.iceberg=0 -s3.port.lance=0
