"""How many mutants of the pure cores the quick tests kill: `make mutate SEED=1 MUTANTS=400`.

mutmut writes every mutant of the files that [tool.mutmut] of pyproject.toml names into mutants/, notes which test
calls which function, and forks a process for each mutant that runs those tests. This draws some of them by a seed and
lists what survived, each with its reason where equivalent_mutants.yaml has one.
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "benchmarks" / "equivalent_mutants.yaml"
KILLED = {"killed", "timeout"}


class Survivor(NamedTuple):
    name: str
    """Module, function and number, as `mutmut show` takes it."""
    removed: str
    added: str
    reason: str | None
    """Why no test can tell it from the original; None where a test is missing."""


def population() -> dict[str, Path]:
    """Every mutant there is -> its file."""
    return {
        get_mutant_name(path, name): path
        for path in sorted(walk_mutatable_files())
        for name in mutate_file_contents(str(path), path.read_text("utf-8")).mutant_names
    }


def drawn(names: Sequence[str], number: int, seed: int) -> list[str]:
    """`number` of the mutants, each as likely as any other, or all where there are no more."""
    return sorted(random.Random(seed).sample(sorted(names), min(number, len(names))))


def statuses(files: Sequence[Path]) -> dict[str, str]:
    """What mutmut wrote down of each mutant of `files`."""
    result: dict[str, str] = {}
    for path in files:
        data = SourceFileMutationData(path=path)
        data.load()
        result |= {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}
    return result


def change(name: str, path: Path) -> tuple[str, str]:
    """The code that a mutant takes away and what it puts there, each on one line."""
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    return tuple(" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")


def reasons() -> dict[tuple[str, str, str], str]:
    """(function, removed, added) -> why no test can tell."""
    rows = yaml.safe_load(REASONS.read_text(encoding="utf-8")) or []
    return {(row["function"], row["removed"], row["added"]): row["reason"] for row in rows}


def survivors(names: Sequence[str], found: dict[str, str], files: dict[str, Path]) -> list[Survivor]:
    """The mutants of `names` that no test killed."""
    reason_by_mutant = reasons()
    said = []
    for name in names:
        if found[name] in KILLED:
            continue
        removed, added = change(name, files[name])
        function = name.partition("__mutmut")[0]
        said.append(Survivor(name, removed, added, reason_by_mutant.get((function, removed, added))))
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="of the draw")
    parser.add_argument("--mutants", type=int, required=True, help="how many are drawn")
    parser.add_argument("--processes", type=int, required=True, help="mutants at a time")
    parser.add_argument("--least", type=float, default=0.85, help="share killed, else exit code 1")
    options = parser.parse_args()

    # a test that is new since the last time would not be asked otherwise
    shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    config()
    files = population()
    names = drawn(list(files), options.mutants, options.seed)
    began = time.monotonic()
    command = [Path(sys.executable).with_name("mutmut"), "run"]
    ran = subprocess.run([*command, "--max-children", str(options.processes), *names], cwd=ROOT)
    if ran.returncode:
        return ran.returncode

    result = statuses(sorted(set(files.values())))
    alive = survivors(names, result, files)
    counted = Counter(result[name] for name in names)
    score = sum(counted[status] for status in KILLED) / len(names)
    minutes = (time.monotonic() - began) / 60
    for survivor in alive:
        why = survivor.reason or "a test is missing"
        print(f"{survivor.name}\n  - {survivor.removed}\n  + {survivor.added}\n  {why}")
    print(f"seed {options.seed}: {len(names)} of {len(files)} mutants in {minutes:.0f} minutes, {score:.1%} killed")
    print(", ".join(f"{number} {status}" for status, number in counted.most_common()))
    print(f"{sum(survivor.reason is not None for survivor in alive)} of {len(alive)} others are equivalent")
    return 0 if score >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
