"""An upload to a hub: the requests of the real client, answered here."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.integration
NAME = "team/helpdesk"


class Hub(BaseHTTPRequestHandler):
    """What of the hub's API an upload of small files takes."""

    commits: list[list[dict[str, Any]]]
    repositories: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_right":
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            self.repositories.append(json.loads(body))
            return self.answer(200, {"url": f"{self.base}/{NAME}"})
        if self.path == "/api/validate-yaml":  # the model card's head
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path == f"/api/models/{NAME}/preupload/main":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path.startswith(f"/api/models/{NAME}/commit/main"):
            self.commits.append([json.loads(line) for line in body.splitlines()])
            url = f"{self.base}/{NAME}/commit/0123"
            return self.answer(200, {"commitUrl": url, "commitOid": "0123", "success": True})
        return self.answer(404, {"error": f"{self.path} is not known"})

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer hf_right":
            return self.answer(401, {"error": "Invalid username or password."})
        return self.answer(200, {"sha": "0" * 40, "siblings": [], "id": NAME})

    @property
    def base(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    Hub.commits, Hub.repositories = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Hub
    server.shutdown()
    thread.join()
    server.server_close()


def upload(address: str, token: str, *arguments: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "training.export.hub", "--to", name, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_every_file_is_in_one_commit_of_a_private_repository(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, server = hub
    (tmp_path / "gguf").mkdir()
    files = {"README.md": b"a card", "gguf/model-f32.gguf": b"GGUF"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = upload(address, "hf_right", "--folder", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, f"Uploaded to {address}/{NAME}\n")
    assert [repository["visibility"] for repository in server.repositories] == ["private"]
    (commit,) = server.commits
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }
    assert sent == files


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        ("", NAME, "there is no Hugging Face token"),
        ("hf_wrong", NAME, "the hub refuses team/helpdesk: "),
        ("hf_right", "no//name", "--to hub:no//name"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(
    hub: tuple[str, type[Hub]], token: str, name: str, words: str
) -> None:
    done = upload(hub[0], token, name=name)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_hub_that_does_not_answer_is_told_in_one_line() -> None:
    done = upload("http://127.0.0.1:9", "hf_right")
    assert done.returncode == 2
    assert "http://127.0.0.1:9 does not answer" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
