"""A stage of several processes, one of which finds bad input that no other sees: `python -m
tests.training.support.failing STAGE --processes N`.

FAIL_IN_RANK says which, FAIL_AT_STEP after which update it does; 0 is before the processes have met.
"""

import os
import sys

from config.errors import EnvironmentFault


def main() -> int:
    if "RANK" not in os.environ:
        from training.process import launch

        return launch.supervise(
            sys.argv[1], [sys.executable, "-m", "tests.training.support.failing", sys.argv[1]], int(sys.argv[3])
        )
    from tests.training.support.tiny import run_main
    from training.process.stage import Stage

    rank, step = int(os.environ["FAIL_IN_RANK"]), int(os.environ["FAIL_AT_STEP"])
    name = "log" if step else "begin"
    real = getattr(Stage, name)

    def fails(stage: Stage, *given: object) -> None:
        real(stage, *given)
        if stage.rank == rank and stage.step >= step:
            raise EnvironmentFault("the disk of this process is full, and only here.")

    setattr(Stage, name, fails)
    from pathlib import Path

    return run_main(Path(), sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
