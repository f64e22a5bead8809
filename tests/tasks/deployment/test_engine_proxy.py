"""The proxy of the Docker engine, asked by Docker's own client, in front of a socket that answers as an engine does
and keeps what it was asked.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
from docker.errors import APIError

import docker
from tasks.deployment.engine_proxy import ALL_GPUS, COMMAND, MARK, Proxy, Stage

STAGE = Stage("train:1", "stages", ("cache:/cache", "keys:/run/rlhf:ro"))
LINE = b"\x01\0\0\0\0\0\0\x08working\n"
"""Of a container's stdout, as the engine frames it."""


class Engine(ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, _Answer)
        self.asked: list[tuple[str, str, Any]] = []


class _Answer(BaseHTTPRequestHandler):
    server: Engine

    def address_string(self) -> str:
        return "engine"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.asked.append((self.command, self.path, body))
        path = self.path.split("?")[0].removeprefix("/v1.48")
        labels = {MARK: "1"} if path.startswith("/containers/ours") else {"postgres": "1"}
        content = {
            "/version": {"ApiVersion": "1.48", "Version": "28.2.2"},
            "/containers/create": {"Id": "ours", "Warnings": []},
            "/containers/ours/wait": {"StatusCode": 0},
        }.get(path, {"Id": "ours", "Config": {"Labels": labels, "Tty": False}})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(LINE if path.endswith("/logs") else json.dumps(content).encode())

    do_POST = do_DELETE = do_HEAD = do_GET


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(tmp_path / "engine.sock")) as result:
        threading.Thread(target=result.serve_forever, args=(0.02,), daemon=True).start()
        yield result
        result.shutdown()


@pytest.fixture
def client(engine: Engine) -> Iterator[docker.DockerClient]:
    with Proxy(("127.0.0.1", 0), STAGE, str(engine.server_address)) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        result = docker.DockerClient(f"tcp://127.0.0.1:{proxy.server_address[1]}", version="auto")
        yield result
        result.close()
        proxy.shutdown()


def created(engine: Engine) -> dict[str, Any]:
    [body] = [body for method, path, body in engine.asked if "/containers/create" in path]
    return dict(body)


def test_a_stage_is_made_started_awaited_and_removed(client: docker.DockerClient, engine: Engine) -> None:
    container = client.containers.create(
        STAGE.image, "python -m prefect.engine", name="sft-1", environment={"A": "1"},
        network="stages", mem_limit="2g", shm_size="1g", auto_remove=True, labels={"run": "7"},
    )  # fmt: skip
    container.start()
    assert list(container.logs(stream=True)) == [b"working\n"]
    assert container.wait() == {"StatusCode": 0}
    container.stop(timeout=5)
    container.remove()
    assert created(engine) == {
        "Image": "train:1", "Cmd": COMMAND, "Env": ["A=1"], "StopSignal": "SIGTERM",
        "Labels": {"run": "7", MARK: "1"},
        "HostConfig": {
            "Binds": list(STAGE.binds), "NetworkMode": "stages", "Memory": 2 << 30,
            "ShmSize": 1 << 30, "AutoRemove": True, "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"], "DeviceRequests": [],
        },
    }  # fmt: skip
    assert any("name=sft-1" in path for _, path, _ in engine.asked)
    assert any(path.endswith("/containers/ours/stop?t=5") for _, path, _ in engine.asked)


def test_what_would_be_root_on_the_machine_does_not_reach_the_engine(
    client: docker.DockerClient, engine: Engine
) -> None:
    client.containers.create(
        STAGE.image, "sh -c evil", entrypoint="/bin/sh", user="root", privileged=True,
        volumes=["/:/host"], mounts=[docker.types.Mount("/m", "/", type="bind")],
        pid_mode="host", network_mode="host", cap_add=["SYS_ADMIN"], devices=["/dev/sda:/dev/sda"],
        security_opt=["seccomp=unconfined"], volumes_from=["postgres"],
        device_requests=[docker.types.DeviceRequest(driver="x", count=-1, capabilities=[["gpu"]])],
    )  # fmt: skip
    result = created(engine)
    assert (result["Cmd"], result["HostConfig"]["Binds"]) == (COMMAND, list(STAGE.binds))
    assert result["HostConfig"]["DeviceRequests"] == ALL_GPUS
    assert set(result) == {"Image", "Cmd", "Env", "StopSignal", "Labels", "HostConfig"}
    assert set(result["HostConfig"]) == {
        "Binds", "NetworkMode", "Memory", "ShmSize", "AutoRemove", "CapDrop", "SecurityOpt",
        "DeviceRequests",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/containers/json"),
        ("GET", "/containers/postgres/json"),
        ("GET", "/containers/postgres/logs"),
        ("POST", "/containers/postgres/stop"),
        ("DELETE", "/containers/postgres"),
        ("POST", "/containers/ours/exec"),
        ("GET", "/containers/ours/archive"),
        ("PUT", "/containers/ours/archive"),
        ("POST", "/containers/ours/update"),
        ("POST", "/containers/ours/../postgres/stop"),
        ("GET", "/containers/postgres/json?/containers/ours/json"),
        ("GET", "/images/other/json"),
        ("POST", "/images/create?fromImage=other&tag=1"),
        ("POST", "/images/create?fromImage=train&tag=1&fromSrc=http://x"),
        ("POST", "/build"),
        ("GET", "/volumes"),
        ("GET", "/secrets"),
        ("POST", "/swarm/init"),
        ("GET", "/_ping/../info"),
    ],
)
def test_the_rest_of_the_engine_is_not_there(
    client: docker.DockerClient, engine: Engine, method: str, path: str
) -> None:
    before = len(engine.asked)
    answer = client.api.request(method, f"{client.api.base_url}/v1.48{path}")
    assert answer.status_code in (403, 501)
    looked_at = ("GET", "/containers/postgres/json", None)
    assert [request for request in engine.asked[before:] if request != looked_at] == []


def test_another_image_is_refused_and_the_stages_own_is_found_and_pulled(
    client: docker.DockerClient, engine: Engine
) -> None:
    with pytest.raises(APIError, match="alpine is not the image of stages, train:1"):
        client.containers.create("alpine")
    client.images.get(STAGE.image)
    assert list(client.api.pull("train", tag="1", stream=True))
    assert not any("create" in path and body for _, path, body in engine.asked)


def test_a_body_that_is_no_request_is_reported(client: docker.DockerClient) -> None:
    for body in ("[", "[]", '{"Image": "train:1", "HostConfig": {"Memory": "x"}}'):
        url = f"{client.api.base_url}/v1.48/containers/create"
        assert client.api.post(url, data=body).status_code == 400
