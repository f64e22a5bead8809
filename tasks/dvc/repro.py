"""`dvc repro` of single stages, each in a process of its own that is started while the stage before
it is at work.

Most of what DVC takes beside a stage is importing it. A process that waits has that behind it, and
goes on when it is told to:

    python -m tasks.dvc.repro dvc repro --single-item STAGE    # waits for a line on its standard
    input; at its end it goes away
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import psutil

from config.dvc_stages import dvc_name
from config.records import CHANGED_CODE_VARIABLE, PIPELINE_VARIABLE, RUN_ID_VARIABLE
from tasks.dvc.status import environment
from tasks.run.changed_code import policy
from tasks.run.run import Run

REPRO = ("dvc", "repro", "--single-item")
"""What `dvc repro` of a stage has in its command line, started ahead or by hand."""
GO = b"go\n"


class ReproProcesses:
    """Of the stages of one run, `ahead` being those that will have to be done here, in their
    order.
    """

    def __init__(self, run: Run, ahead: Sequence[str] = ()) -> None:
        self._run, self._ahead = run, ahead
        self._waiting: tuple[str, subprocess.Popen[bytes]] | None = None

    def take(self, stage: str) -> "subprocess.Popen[bytes]":
        """The process of `stage`, at work from now on, and the next one waiting. It leads a process
        group of its own, so that Ctrl-C reaches the stage only through us; what it prints goes to
        `log_path`.
        """
        name, process = self._waiting or ("", None)
        self._waiting = None
        if process is not None and (name != stage or not _go(process)):
            _send_away(process)
            process = None
        if process is None:
            process = self._started(stage)
            _go(process)
        self.prepare(stage)
        return process

    def prepare(self, after: str | None = None) -> None:
        """Start the first of the stages ahead, or the one `after`, so that it waits for its
        turn.
        """
        later = self._ahead
        if after is not None:
            later = self._ahead[self._ahead.index(after) + 1 :] if after in self._ahead else ()
        if later:
            self._waiting = (later[0], self._started(later[0]))

    def close(self) -> None:
        """Send away who is still waiting."""
        if self._waiting:
            _send_away(self._waiting[1])
            self._waiting = None

    def _started(self, stage: str) -> "subprocess.Popen[bytes]":
        path = log_path(self._run.root, stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {
            RUN_ID_VARIABLE: self._run.run_id,
            PIPELINE_VARIABLE: f"{os.getpid()}:{psutil.Process().create_time()}",
            CHANGED_CODE_VARIABLE: policy(),
        }
        with path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tasks.dvc.repro", *REPRO, dvc_name(stage)],
                cwd=self._run.root,
                env=environment(**own),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def log_path(root: Path, stage: str) -> Path:
    """What DVC and the stage print."""
    return root / "runs" / stage / "log.txt"


def is_repro_process(command: Sequence[str]) -> bool:
    """Whether a command line is that of DVC bringing a stage up to date, or waiting to."""
    return "repro" in command and any("dvc" in word for word in command)


def _go(process: "subprocess.Popen[bytes]") -> bool:
    """Tell a process that waits to go on; False if it has died meanwhile."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(GO)
        process.stdin.close()
        return True
    return False


def _send_away(process: "subprocess.Popen[bytes]") -> None:
    """It has done nothing yet."""
    process.kill()
    process.communicate()


def main(arguments: Sequence[str]) -> int:
    """Have DVC imported, wait, and do what `arguments` say as its own command does; nothing if the
    run that asked is gone.
    """
    from dvc.cli import main as run_dvc

    import_module("dvc.repo")  # most of what its commands import when they are called
    if sys.stdin.buffer.readline() != GO:
        return 0
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a stage reads no terminal and no pipe
    return int(run_dvc(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
