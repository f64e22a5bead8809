"""Digests of the rows of each version of the data, so that two versions can be compared after one
of them was deleted.

runs/data/rows/<digest of data/prepared>.json   {"sft/train": [digest of a row, ...], ...}

One file per version, whichever runs used it: 20 bytes per row, written once.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from config.atomic_file import write_atomically
from config.workspace.rows import pipeline_rows

PREPARED = "data/prepared"
DIGEST_BYTES = 8
"""Among a million rows the chance that any two share a digest is 3e-8."""

RowDigests = Mapping[str, frozenset[str]]
"""`dataset/split` -> digests of its rows."""


def keep_row_digests(root: Path, version: str) -> None:
    """Write the digests of the rows in data/prepared, which is `version` in DVC; nothing to do if
    they exist.

    Raises OSError if they cannot be written or read.
    """
    target = _path(root, version)
    if target.exists():
        return
    digests = {
        f"{path.parent.name}/{path.stem}": _digests(path)
        for path in sorted((root / PREPARED).glob("*/*.jsonl"))
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, json.dumps(digests))


def read_row_digests(root: Path, version: str | None) -> RowDigests | None:
    """The digests that were kept for a version of the data; None if there are none or they cannot
    be read.
    """
    if version is None:
        return None
    try:
        content = json.loads(_path(root, version).read_text(encoding="utf-8"))
        return {name: frozenset(digests) for name, digests in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def data_version(root: Path, run_id: str) -> str | None:
    """DVC's digest of the prepared data that a pipeline run used; None if it did not get that
    far.
    """
    return _out(root, run_id, "data", PREPARED)


def reward_version(root: Path, run_id: str) -> str | None:
    """DVC's digest of the reward model that a pipeline run used."""
    return _out(root, run_id, "reward", "models/reward")


class Change(NamedTuple):
    """Rows that one version has and the other has not."""

    added: int
    removed: int


def row_change(before: RowDigests, after: RowDigests, name: str) -> Change:
    """Rows of `dataset/split` that were added and removed between the versions; an edited row
    counts as both.
    """
    old, new = before.get(name, frozenset()), after.get(name, frozenset())
    return Change(len(new - old), len(old - new))


def _out(root: Path, run_id: str, stage: str, path: str) -> str | None:
    rows = pipeline_rows(root)
    found = (
        row.detail.get("outs", {}).get(path)
        for row in reversed(rows)
        if (row.run_id, row.event, row.stage) == (run_id, "stage", stage)
    )
    return next((digest for digest in found if isinstance(digest, str)), None)


def _path(root: Path, version: str) -> Path:
    return root / "runs" / "data" / "rows" / f"{version.removesuffix('.dir')}.json"


def _digests(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [
            hashlib.blake2b(line.strip(), digest_size=DIGEST_BYTES).hexdigest()
            for line in file
            if line.strip()
        ]
