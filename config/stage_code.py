"""The code that decides a stage's numbers, as listed in dvc.yaml, and how it differs from the code of a checkpoint."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from config.dvc_stages import defined

CODE = "code.json"
"""File in a checkpoint with the digest of each code file."""


def stage_code(home: Path, stage: str) -> dict[str, str]:
    """SHA-256 of every module that dvc.yaml in `home` has among the deps of `stage`, by path; {} for a stage it does
    not list.
    """
    try:
        deps = defined(home).get(stage, {}).get("deps", [])
    except FileNotFoundError:
        return {}
    return {
        path: hashlib.sha256((home / path).read_bytes()).hexdigest() for dep in deps for path in _modules(home, dep)
    }


def _modules(home: Path, dep: str) -> Iterator[str]:
    if dep.endswith(".py"):
        yield dep
    elif (home / dep / "__init__.py").is_file():
        yield from sorted(path.relative_to(home).as_posix() for path in (home / dep).rglob("*.py"))


def changed_code(checkpoint: Path, now: Mapping[str, str]) -> list[str]:
    """Files that were changed, added or removed since the checkpoint.

    [] if nothing differs. A checkpoint without digests counts as made by entirely different code.
    """
    try:
        before = dict(json.loads((checkpoint / CODE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        before = {}
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def some(files: list[str], most: int = 3) -> str:
    """The first few, and the number of others."""
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return f"{', '.join(files[:most])}{more}"
