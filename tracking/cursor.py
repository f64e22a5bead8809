"""How many rows of this workspace have been shipped to one MLflow.

runs/shipped-<digest of the tracking URI>.json: bytes read of every jsonl file, and the MLflow run of every pipeline
run and attempt. It is written after the rows have arrived. A process killed in between ships them again, and MLflow
keeps one: a metric is identified by run, name, step, timestamp and value, and all of these come from the row.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from config.atomic_file import write_atomically
from config.jsonl import Follower


class Cursor(BaseModel):
    offsets: dict[str, int] = {}
    """File below runs/ -> bytes shipped."""
    runs: dict[str, str] = {}
    """Pipeline run id, or run id/stage/attempt -> MLflow run id."""
    experiment_id: str = ""
    open: list[str] = []
    """Keys of `runs` that MLflow shows as running."""
    spent: dict[str, float] = {}
    """Run id/stage/attempt -> US dollars of its rows that were shipped."""
    champions: str = ""
    """Digest of the champions record that the registry's aliases match."""
    quantised: dict[str, str] = {}
    """Pipeline run id -> digests of the comparison and of the champions record that the registry has of its export."""
    benchmarked: dict[str, str] = {}
    """The same for its benchmarks."""

    def follower(self, root: Path, name: str) -> Follower:
        """A reader of runs/<name> from where shipping stopped; from the start if the file was replaced by a shorter
        one.
        """
        path = root / "runs" / name
        offset = self.offsets.get(name, 0)
        size = path.stat().st_size if path.exists() else 0
        return Follower(path, offset if offset <= size else 0)


def cursor_path(root: Path, uri: str) -> Path:
    """One cursor per tracking URI: rows go to each MLflow once. The URI may hold a password, so it is not part of the
    name.
    """
    return root / "runs" / f"shipped-{hashlib.sha256(uri.encode()).hexdigest()[:12]}.json"


def load(path: Path) -> Cursor:
    """The cursor at `path`, or a new one if it is missing or unreadable: shipping again does no harm."""
    try:
        return Cursor.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return Cursor()


def save(cursor: Cursor, path: Path) -> None:
    write_atomically(path, cursor.model_dump_json(indent=1))


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process ships with this cursor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
