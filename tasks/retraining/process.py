"""Runs the cycle's own processes, measures their cost and passes on their error line."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from config.errors import EXIT_BAD_INPUT, RlhfError, UserError
from config.schema import Params
from costs.tables.price import stage_price
from tasks.dvc.status import environment


def run_helper(
    root: Path,
    params: Params,
    name: str,
    arguments: Sequence[str],
    log: Path,
    charge: Callable[[float], None],
) -> None:
    """Run `python -m training.retraining.<name>` in the project, and `charge` what it cost in US
    dollars, however it ends.

    Raises UserError with its line where it ends with exit code 2, RlhfError for any other failure.
    """
    began = time.monotonic()
    try:
        _run(root, name, arguments, log)
    finally:
        charge(stage_price(params).usd(time.monotonic() - began))


def _run(root: Path, name: str, arguments: Sequence[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", f"training.retraining.{name}", *arguments],
        cwd=root,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    with log.open("a", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == EXIT_BAD_INPUT and lines:
        raise UserError(lines[-1])
    if done.returncode:
        last = lines[-1] if lines else "it printed nothing"
        raise RlhfError(
            f"training.retraining.{name} failed with exit code {done.returncode}: {last}. All it "
            f"printed is in {log}."
        )
