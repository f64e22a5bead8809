"""A stage whose address space may grow by so many bytes once its models are loaded, not more.

`python -m tests.training.support.limited <stage> <bytes>`
"""

import resource
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from config.methods.registry import SAMPLING_METHODS
from training.process.run import entry, run_stage

LAST_LOADED = {
    **dict.fromkeys(SAMPLING_METHODS, ("training.ppo", "load_state")),
    "sft": ("training.sft", "train"),
    "reward": ("training.reward", "train"),
}
"""What each stage calls when everything is in place, by the module whose name for it is looked up."""


def limit(more_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, resource.RLIM_INFINITY))


def main(stage: str, more_bytes: int) -> int:
    place, name = LAST_LOADED[stage]
    caller: Any = import_module(place)
    loaded = getattr(caller, name)

    def limited(*arguments: Any) -> Any:
        limit(more_bytes)
        return loaded(*arguments)

    setattr(caller, name, limited)
    return run_stage(stage, *entry(stage))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
