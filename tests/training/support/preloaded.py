"""`python -m MODULE` as a fork of a process that has imported what stages import, so that this is
paid once for all that the tests of a session start.

A fork is a process like any other to whoever signals, kills or awaits it. That a stage also starts
from nothing is seen in test_launch.py, test_standalone.py and tests/e2e.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import TimeoutExpired

from training.process.garbage_collection import IMPORTING

ROOT = Path(__file__).parents[3]
IMPORTED = ("training.data", "training.reward", "training.evaluate", "tests.training.support.tiny")
"""Together they import all that a stage does."""
POLL_SECONDS = 0.005


class Forked:
    """What of `subprocess.Popen` the tests use: no stdout, stderr as text in a pipe."""

    def __init__(
        self, module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTED, __name__])
        with contextlib.chdir(ROOT):  # where it finds what it imports
            forkserver.ensure_running()
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_become, args=(module, list(arguments), str(cwd), dict(environment), writer)
        )
        self._process.start()
        writer.close()
        with reader:
            self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(["python", "-m"], timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """What it has said by its end."""
        with self.stderr:
            os.set_blocking(self.stderr.fileno(), False)
            deadline = None if timeout is None else time.monotonic() + timeout
            said = b""
            while piece := self._read():
                if piece is not True:
                    said += piece
                elif deadline is not None and time.monotonic() > deadline:
                    raise TimeoutExpired(["python", "-m"], timeout or 0.0)
                else:
                    time.sleep(POLL_SECONDS)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), POLL_SECONDS))
        return None, said.decode()

    def _read(self) -> bytes | bool:
        """Bytes, none at the end; True where there is nothing yet."""
        try:
            return os.read(self.stderr.fileno(), 65536)
        except BlockingIOError:
            return True

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(
    module: str,
    arguments: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    stderr: Connection,
) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    gc.set_threshold(*IMPORTING)  # as after its own imports
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
