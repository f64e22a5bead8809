"""Who gets into the stack, and where from: asked of the running one, as somebody who means harm would."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.containers.stack import PROJECT, Stack, docker, status

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(5400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

KNOCK = """
import json, socket, sys
found = {}
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), timeout=1).close()
        found[f"{host}:{port}"] = True
    except OSError:
        found[f"{host}:{port}"] = False
print(json.dumps(found))
"""
"""Which of some doors answer."""
ASK_THE_CLUSTER = """
import sys
from ray._raylet import GcsClient
address = sys.argv[1]
print(GcsClient(address=address).internal_kv_keys(b"", None, 20))
"""
"""What Ray's head has in its store: code of the pipelines."""
SHAKE_HANDS = r"""
import socket, ssl
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
with context.wrap_socket(socket.create_connection(("s3", 19000), timeout=10)) as made:
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    print(made.recv(100))
"""
OWN_CODE = "find /app /opt -xdev \\( -type f -o -type d \\) -writable | head -5"


def addresses(stack: Stack) -> dict[str, dict[str, str]]:
    """Service -> network -> address of its container."""
    ids = stack.compose("ps", "--quiet").split()
    return {
        load["Config"]["Labels"]["com.docker.compose.service"]: {
            name.removeprefix(f"{PROJECT}_"): network["IPAddress"]
            for name, network in load["NetworkSettings"]["Networks"].items()
        }
        for load in json.loads(docker("inspect", *ids))
    }


def in_a_stages_place(images: dict[str, str], program: str, *arguments: str, **variables: str) -> str:
    """What a program prints that runs where stages run."""
    told = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    network = f"{PROJECT}_stages"
    return docker("run", "--rm", "--network", network, *told, images["train"], "python", "-c", program, *arguments)


def test_prefect_asks_for_its_key_and_is_asked_under_its_own_name_only(stack: Stack) -> None:
    url, key = f"{stack.prefect}/api/admin/version", stack.secrets["PREFECT_KEY"]
    assert [status(url), status(url, "wrong"), status(url, key)] == [401, 401, 200]
    assert status(url, key, host="evil.example") in (400, 403, 421)
    assert status(f"{stack.prefect}/api/health") == 200


def test_mlflow_asks_for_its_login_and_is_asked_under_its_own_name_only(stack: Stack) -> None:
    url = f"{stack.mlflow}/api/2.0/mlflow/experiments/search?max_results=1"
    login = f"rlhf:{stack.secrets['MLFLOW_PASSWORD']}"
    assert [status(url), status(url, "rlhf:wrong"), status(url, login)] == [401, 401, 200]
    assert status(url, login, host="evil.example") in (400, 403, 421)
    assert status(f"{stack.mlflow}/") == 401, "its pages too"


def test_a_stage_reaches_the_store_and_the_cluster_and_no_other_door(images: dict[str, str], stack: Stack) -> None:
    result = addresses(stack)
    ports = {
        "cpu-worker": (8080, 8265, 10001, 6379), "ray-worker": (8080, 8265, 10001),
        "postgres": (5432,), "mlflow": (5000,), "prefect": (4200,),
        "s3": (9000, 8888, 18888, 9333, 19333, 8080, 18080, 8333, 8111),
    }  # fmt: skip
    doors = [
        (address, port)
        for service, item in ports.items()
        for address in (service, *result[service].values())
        for port in item
    ]
    answered = json.loads(in_a_stages_place(images, KNOCK, json.dumps(doors)))
    assert {door for door, open_ in answered.items() if open_} == {
        "s3:9000", f"{result['s3']['stages']}:9000",
        "cpu-worker:6379", f"{result['cpu-worker']['stages']}:6379",
    }  # fmt: skip


@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}])
def test_ray_lets_nobody_in_without_the_token(images: dict[str, str], stack: Stack, variables: dict[str, str]) -> None:
    address = f"{addresses(stack)['cpu-worker']['stages']}:6379"
    token = stack.compose("exec", "-T", "cpu-worker", "cat", "/run/rlhf/ray").strip()
    assert len(token) == 64
    known = in_a_stages_place(images, ASK_THE_CLUSTER, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    assert known.startswith("["), known
    with pytest.raises(AssertionError, match=r"(?i)unauthenticated|authentication|token"):
        in_a_stages_place(images, ASK_THE_CLUSTER, address, **variables)


def test_the_stores_port_for_its_own_parts_turns_away_who_has_no_certificate(
    images: dict[str, str], stack: Stack
) -> None:
    with pytest.raises(AssertionError, match=r"(?i)certificate.required"):
        in_a_stages_place(images, SHAKE_HANDS)


def store_as(stack: Stack, role: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=stack.s3,
        aws_access_key_id=stack.secrets[f"{role}ACCESS_KEY"],
        aws_secret_access_key=stack.secrets[f"{role}SECRET_KEY"],
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 2}),
    )


def refused(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    return False


@pytest.mark.parametrize(
    ("role", "own", "others"), [("S3_STAGE_", "rlhf", "rlhf-mlflow"), ("S3_MLFLOW_", "rlhf-mlflow", "rlhf")]
)
def test_a_key_of_the_store_is_good_for_the_bucket_of_its_role(stack: Stack, role: str, own: str, others: str) -> None:
    root, client = stack.store(), store_as(stack, role)
    mine, theirs = {"Bucket": own, "Key": "test/mine"}, {"Bucket": others, "Key": "test/theirs"}
    root.put_object(**theirs, Body=b"theirs")
    client.put_object(**mine, Body=b"mine")
    assert client.get_object(**mine)["Body"].read() == b"mine"
    result = client.list_objects_v2(Bucket=own, Prefix="test/")["Contents"]
    assert [item["Key"] for item in result] == ["test/mine"]
    client.delete_object(**mine)

    assert refused(lambda: client.get_object(**theirs))
    assert refused(lambda: client.put_object(**theirs, Body=b"x"))
    assert refused(lambda: client.delete_object(**theirs))
    assert refused(lambda: client.create_multipart_upload(**theirs))
    assert refused(lambda: client.copy_object(**mine, CopySource=f"{others}/test/theirs"))
    for prefix in ("", "test/"):
        assert refused(lambda prefix=prefix: client.list_objects_v2(Bucket=others, Prefix=prefix))
    assert refused(lambda: client.head_bucket(Bucket=others))
    with suppress(ClientError):  # refused as a whole, or each key in the answer: it has to be there
        client.delete_objects(Bucket=others, Delete={"Objects": [{"Key": "test/theirs"}]})
    assert root.get_object(**theirs)["Body"].read() == b"theirs"
    assert refused(lambda: client.create_bucket(Bucket="evil"))
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [everybody]})
    for bucket in (own, others):
        assert refused(lambda bucket=bucket: client.delete_bucket(Bucket=bucket)), bucket
        assert refused(lambda bucket=bucket: client.put_bucket_policy(Bucket=bucket, Policy=policy)), bucket
    root.delete_object(**theirs)


def test_nobody_without_a_key_gets_anything_from_the_store(stack: Stack) -> None:
    assert status(f"{stack.s3}/rlhf?list-type=2") == 403
    assert status(f"{stack.s3}/rlhf/.rlhf") == 403


@pytest.mark.parametrize("image", ["orchestrator", "train", "retrain"])
def test_what_runs_in_an_image_cannot_change_its_code(images: dict[str, str], image: str) -> None:
    user = docker("run", "--rm", images[image], "sh", "-c", f"id -u && {OWN_CODE}").split()
    assert user == ["1000"]


def test_no_service_has_rights_of_linux_or_can_gain_any(stack: Stack) -> None:
    for service in ("prefect", "mlflow", "cpu-worker", "ray-worker", "s3"):
        said = stack.compose("exec", "-T", service, "cat", "/proc/1/status")
        state = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
        assert int(state["CapEff"], 16) == int(state["CapBnd"], 16) == 0, service
        assert (state["NoNewPrivs"].strip(), state["Uid"].split()[0]) == ("1", "1000"), service
