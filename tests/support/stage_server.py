"""A process that has imported the libraries of all stages and is forked for each that something
below a test starts as `python -m training.X`.

For whole pipelines whose test is not about processes: what a stage imports takes it longer than
its work there. Its own modules are those of the folder that it is started in. Real starts are in
tests/e2e/test_pipeline.py.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

HOOK = Path(__file__).parent / "forking"
VARIABLE = "TESTS_STAGE_SERVER"
IMPORTED = ("training.data", "training.reward", "training.evaluate", "training.retraining.contest")
OURS = ("config", "costs", "tests", "training")
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02


@contextlib.contextmanager
def forked_stages(imported: Sequence[str] = IMPORTED) -> Iterator[dict[str, str]]:
    """The environment in which stages are forks of a server that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        address = Path(folder) / "address"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.stage_server", str(address), *imported]
        with subprocess.Popen(command, env=environment) as server:
            try:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not address.exists():
                    assert server.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(POLL_SECONDS)
                yield {VARIABLE: str(address), "PYTHONPATH": str(HOOK)}
            finally:
                server.kill()


def serve(address: Path, imported: Sequence[str]) -> None:
    for module in imported:
        import_module(module)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]  # a stage has those of its own folder
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who mind a stage leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        unready = address.with_suffix(".unready")
        listener.bind(str(unready))
        listener.listen()
        unready.rename(address)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                mind(connection)
            connection.close()


def mind(connection: socket.socket) -> None:
    """Do what is asked for in a fork, tell its id and then how it ended; it ends with the one who
    asked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, fds, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb", buffering=0) as stream:
        content = b""
        while len(content) < int.from_bytes(size, "big"):
            content += stream.read(int.from_bytes(size, "big") - len(content)) or b""
    child = os.fork()
    if child == 0:
        connection.close()
        become(json.loads(content), fds)
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):  # who asked is gone: seen below
        connection.sendall(child.to_bytes(8, "big"))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(code.to_bytes(8, "big", signed=True))
            os._exit(0)
        if select.select([connection], [], [], POLL_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os._exit(0)


def become(asked: dict[str, Any], fds: list[int]) -> None:
    """Be `python -m MODULE ARGUMENTS` to its end."""
    code = 1
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[0] = asked["cwd"]
        sys.argv = ["-m", *asked["arguments"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever ends a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
