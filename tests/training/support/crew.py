"""Several processes that run many stages one after another, so that their imports are paid once: `python -m
tests.training.support.crew JOBS`.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import torch

from config.errors import EXIT_DONE, EXIT_RESUMABLE
from config.load import read, validate, write
from config.records import RENDEZVOUS_VARIABLE
from tests.conftest import ROOT
from tests.training.support.processes import started

PATIENCE_SECONDS = 600.0


class Job(NamedTuple):
    """A stage to run in a folder."""

    root: str
    stage: str
    level: str = "none"
    """Of `sharding`; put into the folder's params.yaml."""
    offload: bool = False
    stops: bool = False
    """As if it were asked to stop while its first step is running."""


def run_together(jobs: Sequence[Job], processes: int = 2) -> None:
    """Run each job by `processes` processes; fails with what they said unless all end as they should."""
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            RENDEZVOUS_VARIABLE: str(Path(folder) / "rendezvous"),
        }
        crew: list[Popen[str]] = []
        try:
            for rank in range(processes):
                ranked = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                crew.append(started("tests.training.support.crew", [json.dumps(jobs)], ROOT, **ranked))
            with ThreadPoolExecutor(processes) as reading:  # a full pipe would hold up all
                said = list(reading.map(lambda member: member.communicate(PATIENCE_SECONDS)[1], crew))
        finally:
            for member in crew:
                member.kill()
                member.wait()
        assert [member.returncode for member in crew] == [0] * processes, "\n".join(said)


def main(jobs: Sequence[Job]) -> int:
    """Run the jobs as one of the processes; the exit code of the first that does not end as it should."""
    from tests.training.support.tiny import run_main
    from training.distributed import collectives
    from training.process.stage import Stage

    collectives.join("crew", torch.device("cpu"))
    part = collectives.leave
    collectives.join = lambda *_: None
    collectives.leave = lambda: None
    begin = Stage.begin
    for job in jobs:
        path = Path(job.root) / "params.yaml"
        if collectives.rank() == 0:
            content = read(path)
            content["where"][job.stage] = {"sharding": job.level, "offload": job.offload}
            write(validate(content, "crew"), path)
        collectives.barrier()

        def begin_stopping(stage: Stage, stops: bool = job.stops) -> None:
            begin(stage)
            stage.stopper.requested = stops

        Stage.begin = begin_stopping  # type: ignore[method-assign]
        code = run_main(Path(job.root), job.stage)
        if code != (EXIT_RESUMABLE if job.stops else EXIT_DONE):
            return code or 1
    part()
    return 0


if __name__ == "__main__":
    sys.exit(main([Job(*job) for job in json.loads(sys.argv[1])]))
