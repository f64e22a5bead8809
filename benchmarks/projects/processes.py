"""Stages and other modules in processes of their own, each with a log of what it said."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.projects.checkouts import ROOT


def stage_process(folder: Path, module: str, environment: Mapping[str, str], *arguments: str) -> None:
    """Run one of our modules in `folder`; what it says goes to a log there.

    Raises SystemExit with the log's last line if it fails.
    """
    run_logged(
        [sys.executable, "-m", module, *arguments], folder, f"{module}.log", {**environment, "PYTHONPATH": str(ROOT)}
    )


def run_logged(command: list[str], folder: Path, log: str, environment: Mapping[str, str]) -> None:
    """Run a command in `folder`, its output in `log` there.

    Raises SystemExit with the log's last line if it fails.
    """
    print(f"{folder.name}: {log.removesuffix('.log')}", file=sys.stderr)
    with (folder / log).open("w", encoding="utf-8") as said:
        code = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, stdout=said, stderr=said, check=False
        ).returncode
    if code:
        lines = (folder / log).read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
            "nothing was said"
        ]
        raise SystemExit(
            f"{' '.join(command)} failed with exit code {code}: {lines[-1]}. The whole log is {folder / log}."
        )
