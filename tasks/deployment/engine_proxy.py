"""A proxy for the part of the Docker engine's API that a worker of stages needs.

Whoever reaches the engine's socket is root on its machine: a container may mount / and be privileged. So the workers
of docker/compose.yaml do not have it. They ask this proxy, which makes containers of one image, with one command, the
two volumes and the network of the stack, and lets only those be looked at, started, stopped and removed. What a
request asks for beyond that is not passed on: the engine gets a new one. `python -m tasks.deployment.engine_proxy
PORT`.
"""

import argparse
import http.client
import json
import os
import re
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

SOCKET = "/var/run/docker.sock"
MARK = "rlhf.stage-container"
"""Label of containers made through this proxy."""
COMMAND = ["python", "-m", "prefect.engine"]
ALL_GPUS = [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}]
MOST_BYTES = 1 << 20
"""Largest body of a request, in bytes."""
CONTAINER = re.compile(r"/containers/([a-zA-Z0-9][a-zA-Z0-9_.-]*)(?:/(\w+))?")
MAY = {("GET", "json"), ("GET", "logs"), ("POST", "start"), ("POST", "stop"), ("POST", "wait"),
       ("POST", "kill"), ("DELETE", None)}  # fmt: skip
"""Allowed actions on our containers."""


class Refused(Exception):
    """A request that is not forwarded."""


class Stage(NamedTuple):
    """Fixed properties of a stage's container."""

    image: str
    network: str
    binds: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Stage":
        return cls(
            environment["RLHF_TRAIN_IMAGE"],
            environment["RLHF_NETWORK"],
            (f"{environment['RLHF_CACHE_VOLUME']}:/cache", f"{environment['RLHF_CREDENTIALS_VOLUME']}:/run/rlhf:ro"),
        )


def container(stage: Stage, body: Any) -> dict[str, Any]:
    """The body of POST /containers/create that the engine gets in place of `body`. Raises Refused for another image,
    ValueError and TypeError for an invalid request.
    """
    if body.get("Image") != stage.image:
        raise Refused(f"{body.get('Image')} is not the image of stages, {stage.image}")
    host = body.get("HostConfig") or {}
    return {
        "Image": stage.image,
        "Cmd": COMMAND,
        "Env": [str(entry) for entry in body.get("Env") or ()],
        "Labels": {str(k): str(v) for k, v in (body.get("Labels") or {}).items()} | {MARK: "1"},
        "StopSignal": "SIGTERM",
        "HostConfig": {
            "Binds": list(stage.binds),
            "NetworkMode": stage.network,
            "Memory": int(host.get("Memory") or 0),
            "ShmSize": int(host.get("ShmSize") or 0),
            "AutoRemove": host.get("AutoRemove") is True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "DeviceRequests": ALL_GPUS if host.get("DeviceRequests") else [],
        },
    }


class _Engine(http.client.HTTPConnection):
    """A connection to the engine's socket."""

    def __init__(self, path: str) -> None:
        super().__init__("engine")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], stage: Stage, engine: str = SOCKET) -> None:
        super().__init__(address, _Request)
        self.stage, self.engine = stage, engine


class _Request(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """No logging: requests contain the environment of stages."""

    def _answer(self) -> None:
        self.close_connection = True  # one request per connection: nothing can hide behind it
        try:
            path, body = self._allowed()
        except Refused as fault:
            self._say(403, f"refused by the proxy of the engine: {fault}.")
        except (ValueError, TypeError, AttributeError):
            self._say(400, "not a request that the proxy of the engine reads.")
        except (OSError, http.client.HTTPException) as fault:
            self._say(502, f"the engine does not answer: {fault}.")
        else:
            self._pass_on(path, body)

    def _allowed(self) -> tuple[str, bytes | None]:
        """The path with its query, and the body, of the request to the engine. Raises Refused."""
        sent = self._body()
        url = urlsplit(self.path)
        version = re.match(r"/v\d+\.\d+(?=/)", url.path)
        prefix = version[0] if version else ""
        path, query = url.path.removeprefix(prefix), parse_qs(url.query)
        if self.command in ("GET", "HEAD") and path in ("/_ping", "/version"):
            return prefix + path, None
        if (self.command, path) == ("POST", "/containers/create"):
            body = container(self.server.stage, json.loads(sent))
            name = query.get("name", [""])[0]
            return f"{prefix}{path}?name={quote(name)}", json.dumps(body).encode()
        if self._reads_the_image(path, query):
            return prefix + path + (f"?{url.query}" if url.query else ""), None
        match = CONTAINER.fullmatch(path)
        if match and (self.command, match[2]) in MAY and self._is_ours(match[1]):
            return prefix + path + (f"?{url.query}" if url.query else ""), None
        raise Refused(f"{self.command} {path}")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            raise Refused("a body of unknown length")
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= MOST_BYTES:
            raise Refused(f"a body of {size} bytes")
        return self.rfile.read(size)

    def _reads_the_image(self, path: str, query: dict[str, list[str]]) -> bool:
        """Whether only this image is inspected or pulled."""
        image = self.server.stage.image
        if self.command == "GET":
            return unquote(path) == f"/images/{image}/json"
        name, tag = query.get("fromImage", [""]), query.get("tag", ["latest"])
        return (
            (self.command, path) == ("POST", "/images/create")
            and set(query) <= {"fromImage", "tag"}
            and [f"{name[0]}:{tag[0]}"] * len(name) * len(tag) == [image]
        )

    def _is_ours(self, name: str) -> bool:
        connection = _Engine(self.server.engine)
        try:
            connection.request("GET", f"/containers/{name}/json")
            answer = connection.getresponse()
            if answer.status != 200:
                return answer.status == 404  # the engine reports it itself
            labels = json.loads(answer.read())["Config"]["Labels"] or {}
            return labels.get(MARK) == "1"
        finally:
            connection.close()

    def _pass_on(self, path: str, body: bytes | None) -> None:
        connection = _Engine(self.server.engine)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(self.command, path, body, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as fault:
            self._say(502, f"the engine does not answer: {fault}.")
            return
        try:
            self.send_response(answer.status)
            for name in ("Content-Type", "Api-Version", "Docker-Experimental", "Ostype"):
                if answer.getheader(name):
                    self.send_header(name, str(answer.getheader(name)))
            self.send_header("Connection", "close")  # closing ends the answer
            self.end_headers()
            while part := answer.read1(65536):
                self.wfile.write(part)
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client is gone
        finally:
            connection.close()

    def _say(self, status: int, message: str) -> None:
        body = json.dumps({"message": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    Proxy(("0.0.0.0", parser.parse_args().port), Stage.of(os.environ)).serve_forever()
