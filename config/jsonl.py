"""Append-only JSON Lines files, safe against kill -9."""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

R = TypeVar("R", bound=BaseModel)


class Rows(NamedTuple):
    """Rows of a file. `skipped` counts lines that are incomplete or do not match the schema."""

    rows: list
    skipped: int


def append(path: Path, row: BaseModel) -> None:
    """Append one row in a single write, creating file and folders; an incomplete last line is terminated first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = row.model_dump_json(exclude_none=True).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(path: Path, schema: type[R]) -> Rows:
    """All complete rows of `path`, none if the file does not exist."""
    if not path.exists():
        return Rows([], 0)
    rows, skipped = [], 0
    for line in path.read_bytes().splitlines():
        try:
            rows.append(schema.model_validate_json(line))
        except ValidationError:
            skipped += 1
    return Rows(rows, skipped)


class Follower:
    """Reads new complete lines of a growing file, as `tail -f` would."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """Bytes read so far, for callers that must not read a row twice."""
        self.skipped = 0

    def read(self, schema: type[R]) -> Iterator[R]:
        """Rows added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    yield schema.model_validate_json(line)
                except ValidationError:
                    self.skipped += 1


def plain(path: Path, step: int = 1) -> Iterator[dict]:
    """Objects of a jsonl file that this project wrote and that is known to be complete; of every `step`-th line."""
    with path.open(encoding="utf-8") as file:
        for line in islice(file, None, None, step):
            yield json.loads(line)
