"""The code that decides a stage's numbers, as dvc.yaml lists it, and how it differs from the code
that made a checkpoint.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from config.dvc_stages import defined

CODE = "code.json"
"""In a checkpoint: digest of each file of the code that made it."""


def stage_code(home: Path, stage: str) -> dict[str, str]:
    """SHA-256 of every module that dvc.yaml in `home` has among the deps of `stage`, by path; {}
    where it does not know the stage.
    """
    try:
        deps = defined(home).get(stage, {}).get("deps", [])
    except FileNotFoundError:
        return {}
    return {
        path: hashlib.sha256((home / path).read_bytes()).hexdigest()
        for dep in deps
        for path in _modules(home, dep)
    }


def _modules(home: Path, dep: str) -> Iterator[str]:
    if dep.endswith(".py"):
        yield dep
    elif (home / dep / "__init__.py").is_file():
        yield from sorted(path.relative_to(home).as_posix() for path in (home / dep).rglob("*.py"))


def changed_code(checkpoint: Path, now: Mapping[str, str]) -> list[str]:
    """Files of `now` that are other than, or new since, those that made the checkpoint, and those
    that are gone.

    [] if nothing differs. A checkpoint that names no code counts as made by other code altogether.
    """
    try:
        before = dict(json.loads((checkpoint / CODE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        before = {}
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def some(files: list[str], most: int = 3) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return f"{', '.join(files[:most])}{more}"
