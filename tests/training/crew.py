"""Several processes that run many stages one after another, so that their imports are paid once: `python -m tests.training.crew`.

Reads a JSON list of [folder, stage] and runs each with as many processes as WORLD_SIZE says. The first process writes exit codes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from config.records import RENDEZVOUS_VARIABLE
from tests.training.tiny import ROOT

PATIENCE_SECONDS = 240.0


def run_together(work: Sequence[tuple[Path, str]], processes: int = 2) -> None:
    """Run each stage in its folder by `processes` processes; fails with what they said unless all end well."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
            RENDEZVOUS_VARIABLE: str(Path(folder) / "rendezvous"),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.training.crew", json.dumps([[str(root), stage] for root, stage in work])]
        crew: list[subprocess.Popen[str]] = []
        try:
            for rank in range(processes):
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                crew.append(subprocess.Popen(command, env=ranked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            said = [member.communicate(timeout=PATIENCE_SECONDS)[1] for member in crew]
        finally:
            for member in crew:
                member.kill()
            for member in crew:
                member.wait()
    assert [member.returncode for member in crew] == [0] * processes, "\n".join(said)


def main(work: Sequence[tuple[str, str]]) -> int:
    import torch

    from tests.training.tiny import run_main
    from training import processes

    torch.set_num_threads(1)
    processes.join("crew", accelerator=False)
    part = processes.leave
    processes.join = lambda *_: None
    processes.leave = lambda: None
    for root, stage in work:
        if code := run_main(Path(root), stage):
            return code
    part()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
