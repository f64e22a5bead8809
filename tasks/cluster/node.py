"""A node's part of a placed stage: an actor that makes a workspace, starts the stage's process in it, and hands its
rows to the pipeline.

The process outlives its actor by what a checkpoint takes: it sees that its parent is gone, as every stage does.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from config.locks import CHECKPOINT_SECONDS, is_held
from config.names import inner_name, inside
from config.workspace.at_work import RUN_LOCK
from tasks.run.store import Store
from tasks.run.workspace import HOME, lay_out, pinned_versions

REQUEST, REPLY, OFFSETS, OUTPUT = "request.json", "reply.json", "offsets.json", "output.txt"
"""Files of a workspace: what to do, how it ended, the bytes of each file that the pipeline has, what was printed."""
ROWS = ("attempts.jsonl", "usage.jsonl", "metrics.jsonl", "samples.jsonl", "diverged.jsonl", "log.txt")
"""Files of runs/<stage>/ that the pipeline follows."""
OF_RAY = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that Ray sets for its own process: threads and code are the stage's to choose."""
LOWEST_FREE_BYTES = 2 * 2**30
PACKAGES = ("ray", "torch", "transformers", "trl")
"""What decides what a stage does: another version would give other results."""


class Facts(NamedTuple):
    """A node, as its actor sees it."""

    node_id: str
    address: str
    port: int
    """A free one, where the processes of the stage can meet."""
    about: str
    """Versions, devices, free space, for people."""
    unfit: str
    """Why it cannot run a stage; empty if it can."""


class News(NamedTuple):
    """What is new of a stage on a node."""

    rows: dict[str, bytes]
    """File -> complete lines behind what the pipeline has."""
    reply: bytes | None
    """How it ended; None while it runs."""


class Node:
    """The actor."""

    def __init__(self) -> None:
        self._home = home()
        self._process: subprocess.Popen[bytes] | None = None

    def facts(self, store: str, volumes: dict[str, str]) -> Facts:
        """`store` is the URL of the DVC remote, `volumes` are key -> path of what has to be mounted here."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        return Facts(
            context.get_node_id(), ray.util.get_node_ip_address(), port, _about(self._home),
            unfit(self._home, store, volumes),
        )  # fmt: skip

    def start(self, request: dict[str, Any], files: dict[str, str]) -> None:
        """Make the workspace of a request, with these files in it, and start the stage's process."""
        self._root = self._home / inner_name(request["id"], "id of a request")
        clear(self._home, CHECKPOINT_SECONDS)
        cache = Path(os.environ.get("RLHF_CACHE") or self._home / ".cache")
        lay_out(self._root, request["remote"], cache / "dvc")
        for name, text in files.items():
            path = self._root / inside(name, "a request")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
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


def home() -> Path:
    """The folder of the workspaces of a node."""
    return Path(os.environ.get("RLHF_WORKSPACES") or Path(tempfile.gettempdir()) / "rlhf-workspaces")


def _about(home: Path) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    free = shutil.disk_usage(home).free / 2**30 if home.exists() else 0.0
    return f"{socket.gethostname()}: Python {platform.python_version()}, {versions}, {free:.0f} GiB free"


def unfit(home: Path, store: str, volumes: dict[str, str]) -> str:
    """Why this node cannot run a stage; empty if it can."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            "it runs Ray without a token, so that whoever reaches its ports runs commands there. Start it with "
            "RAY_AUTH_MODE=token."
        )
    wanted = pinned_versions(HOME)
    for name in PACKAGES:
        if version(name).split("+")[0] != wanted[name]:
            return (
                f"it has {name} {version(name)}, and constraints.txt has {wanted[name]}. Install that: pip install "
                f"{name}=={wanted[name]}."
            )
    for key, path in volumes.items():
        if not Path(path).exists():
            return (
                f"{key}={path} is not there. Mount its volume under the same path, or set the where.<stage>.pool of "
                "the stages that read it to local."
            )
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            free = shutil.disk_usage(home).free
        if free < LOWEST_FREE_BYTES:
            return (
                f"{free / 2**30:.1f} GiB are free at {home}, {LOWEST_FREE_BYTES / 2**30:.0f} are needed at least. "
                "Free some space there, or set RLHF_WORKSPACES on that node to a folder on a larger disk."
            )
        if "://" not in store and not Path(store).is_dir():
            return f"the DVC remote {store} is not there. Mount it under the same path, or use one on S3."
        Store(store).require()
    except OSError as error:
        return (
            f"{home} cannot be written ({error.strerror}). Set RLHF_WORKSPACES on that node to a folder that user "
            f"{os.geteuid()} may write."
        )
    except EnvironmentFault as fault:
        return str(fault)
    return ""


def clear(home: Path, age_seconds: float) -> None:
    """Remove workspaces that an actor which was lost has left here."""
    for request in home.glob(f"*/{REQUEST}"):
        with suppress(OSError):  # another actor may be faster
            is_old = time.time() - request.stat().st_mtime >= age_seconds
            if is_old and not is_held(request.parent / RUN_LOCK):
                shutil.rmtree(request.parent)


def _lines(path: Path, start: int) -> bytes:
    """Complete lines behind the first `start` bytes of a file."""
    if not path.exists() or path.stat().st_size <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
