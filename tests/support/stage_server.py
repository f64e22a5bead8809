"""A process that has imported the libraries of all stages and is forked for each that something below a test starts as
`python -m training.X`.

For tests that are not about processes (fixture `quick_stages`): what a stage imports takes longer than its work. Its
own modules are those of the folder that it is started in. Real starts are
in tests/e2e/test_pipeline.py. The workers of a session share one server, which pytest starts.
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
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

HOOK = Path(__file__).parent / "forking"
VARIABLE = "TESTS_STAGE_SERVER"
SHARED = "TESTS_SHARED_STAGE_SERVER"
"""Address of the server of the session; the hook reads VARIABLE alone."""
IMPORTED = ("training.data", "training.reward", "training.evaluate", "training.retraining.contest")
OURS = ("config", "costs", "tests", "training")
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02


@contextlib.contextmanager
def forked_stages(imported: Sequence[str] = IMPORTED) -> Iterator[dict[str, str]]:
    """The environment in which stages are forks of a server that lives as long as the block."""
    with server(imported) as address:
        yield environment_at(address)


@contextlib.contextmanager
def server(imported: Sequence[str] = IMPORTED) -> Iterator[Path]:
    """The address of a server that lives as long as the block; it may not listen yet."""
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        address = Path(folder) / "address"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        environment["HF_HUB_OFFLINE"] = "1"  # read when it is imported
        command = [sys.executable, "-m", "tests.support.stage_server", str(address), *imported]
        with subprocess.Popen(command, env=environment) as process:
            try:
                yield address
            finally:
                process.kill()


def environment_at(address: Path) -> dict[str, str]:
    """The variables that make forks of stages, once the server listens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not address.exists():
        assert address.parent.exists()
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    return {VARIABLE: str(address), "PYTHONPATH": str(HOOK)}


def pytest_configure(config: pytest.Config) -> None:
    """In the process that has workers below it: start their server."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        stack = contextlib.ExitStack()
        os.environ[SHARED] = str(stack.enter_context(server()))
        config.add_cleanup(stack.close)


@pytest.fixture(scope="session")
def stage_environment(own_state: None) -> Iterator[dict[str, str]]:
    if SHARED in os.environ:
        yield environment_at(Path(os.environ[SHARED]))
        return
    with forked_stages() as environment:
        yield environment


FORKING: dict[str, str] = {}
"""The same for processes that are started with an environment of their own: see `forks`."""


@pytest.fixture(scope="session")
def forks(stage_environment: dict[str, str]) -> None:
    """Stages below processes that are started with FORKING are forks."""
    FORKING.update(stage_environment)


@pytest.fixture
def quick_stages(stage_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that the test starts are forks."""
    for name, value in stage_environment.items():
        monkeypatch.setenv(name, value)


def serve(address: Path, imported: Sequence[str]) -> None:
    for module in imported:
        import_module(module)
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
    """Do what is asked for in a fork, tell its id and then how it ended; it ends with the one who asked."""
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
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it,
        signal.signal(signal.SIGINT, signal.default_int_handler)  # and a shell's & this
        if Path("training").exists():  # a stage has the code of its own folder
            for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[0] = asked["cwd"]
        sys.argv = ["-m", *asked["arguments"]]
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
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
