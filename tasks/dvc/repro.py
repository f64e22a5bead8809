"""`dvc repro` of a single stage, in a separate process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from config.alive import created
from config.dvc_stages import dvc_name
from config.records import CHANGED_CODE_VARIABLE, PIPELINE_VARIABLE, RUN_ID_VARIABLE
from tasks.dvc.status import environment
from tasks.run.changed_code import policy
from tasks.run.run import Run

REPRO = ("dvc", "repro", "--single-item")
"""What `dvc repro` of a stage has in its command line, started by a run or by hand."""


def start_repro(run: Run, stage: str) -> "subprocess.Popen[bytes]":
    """The process of `stage`. It leads a process group of its own, so that Ctrl-C reaches the stage
    only through us; what it prints goes to `log_path`.
    """
    path = log_path(run.root, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {
        RUN_ID_VARIABLE: run.run_id,
        PIPELINE_VARIABLE: f"{os.getpid()}:{created(os.getpid())}",
        CHANGED_CODE_VARIABLE: policy(),
    }
    with path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *REPRO, dvc_name(stage)],
            cwd=run.root,
            env=environment(**own),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def log_path(root: Path, stage: str) -> Path:
    """Log file of DVC and the stage."""
    return root / "runs" / stage / "log.txt"


def is_repro_process(command: Sequence[str]) -> bool:
    """Whether a command line is that of `dvc repro`."""
    return "repro" in command and any("dvc" in word for word in command)
