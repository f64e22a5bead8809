"""A node's part of a placed stage: an actor that makes a workspace, starts the stage's process in it, and hands its
rows to the pipeline.

The process outlives its actor by what a checkpoint takes: it sees that its parent is gone, as every stage does.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.names import inner_name
from tasks.run.exchange import put_files
from tasks.run.workspace import lay_out

REQUEST, REPLY, OFFSETS, OUTPUT = "request.json", "reply.json", "offsets.json", "output.txt"
"""Files of a workspace: what to do, how it ended, the bytes of each file that the pipeline has, what was printed."""
ROWS = ("attempts.jsonl", "usage.jsonl", "metrics.jsonl", "samples.jsonl", "diverged.jsonl", "log.txt")
"""Files of runs/<stage>/ that the pipeline follows."""
OF_RAY = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that Ray sets for its own process: threads and code are the stage's to choose."""
LOWEST_FREE_BYTES = 2 * 2**30


class Facts(NamedTuple):
    """A node, as its actor sees it."""

    address: str
    port: int
    """A free one, where the processes of the stage can meet."""
    with_token: bool
    free_bytes: int
    folder: str


class News(NamedTuple):
    """What is new of a stage on a node."""

    rows: dict[str, bytes]
    """File -> complete lines behind what the pipeline has."""
    reply: bytes | None
    """How it ended; None while it runs."""


class Node:
    """The actor."""

    def __init__(self) -> None:
        self._home = Path(os.environ.get("RLHF_WORKSPACES") or Path(tempfile.gettempdir()) / "rlhf-workspaces")
        self._home.mkdir(parents=True, exist_ok=True)
        self._root = self._home
        self._process: subprocess.Popen[bytes] | None = None

    def facts(self) -> Facts:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Facts(
            ray.util.get_node_ip_address(), port, os.environ.get("RAY_AUTH_MODE") == "token",
            shutil.disk_usage(self._home).free, str(self._home),
        )  # fmt: skip

    def start(self, request: dict[str, Any], files: dict[str, str]) -> None:
        """Make the workspace of a request, with these files in it, and start the stage's process."""
        self._root = self._home / inner_name(request["id"], "id of a request")
        shutil.rmtree(self._root, ignore_errors=True)
        cache = Path(os.environ.get("RLHF_CACHE") or self._home / ".cache")
        lay_out(self._root, request["remote"], cache / "dvc")
        put_files(self._root, files)
        (self._root / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        variables = {name: value for name, value in os.environ.items() if name not in OF_RAY}
        with (self._root / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tasks.cluster.work"], cwd=self._root, env=variables,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._stage = request["stage"]

    def news(self, offsets: dict[str, int]) -> News:
        """What is new behind `offsets` bytes of each file; these are safe with the pipeline."""
        assert self._process is not None
        write_atomically(self._root / OFFSETS, json.dumps(offsets))
        code = self._process.poll()  # before the rows: the last ones are there when it has ended
        folder = self._root / "runs" / self._stage
        rows = {name: lines for name in ROWS if (lines := _lines(folder / name, offsets.get(name, 0)))}
        return News(rows, None if code is None else self._reply(code))

    def _reply(self, code: int) -> bytes:
        try:
            return (self._root / REPLY).read_bytes()
        except OSError:
            printed = (self._root / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = printed[-1] if printed else "it printed nothing"
            return json.dumps(
                {"kind": "crashed", "message": f"its process ended with exit code {code}: {last}"}
            ).encode()

    def stop(self) -> None:
        """Ask the stage to stop, once more."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End what still runs, and remove the workspace."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            shutil.rmtree(self._root, ignore_errors=True)


def _lines(path: Path, start: int) -> bytes:
    """Complete lines behind the first `start` bytes of a file."""
    if not path.exists() or path.stat().st_size <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
