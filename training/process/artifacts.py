"""Atomic outputs: written to a temporary path, then renamed; the previous output is kept until then."""

import csv
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.process.faults import named_fault


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` to write a file or folder to; renamed to `target` if the block succeeds.

    Raises EnvironmentFault when the disk is full or not writable; `target` is then as it was.
    """
    temporary = temporary_of(target)
    with _named_faults(target):
        restore(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        try:
            yield temporary
        except BaseException:
            _remove(temporary)
            raise
        _swap(temporary, target)


def temporary_of(target: Path) -> Path:
    """Temporary path used by `replacing`."""
    return target.with_name(f".{target.name}.new")


def restore(target: Path) -> None:
    """Undo a swap that kill -9 interrupted between its two renames."""
    previous = _previous(target)
    if previous.exists():
        if target.exists():
            _remove(previous)
        else:
            previous.rename(target)


def write_json(target: Path, content: Mapping[str, Any]) -> None:
    """A metrics file: indented, keys as given, one trailing newline."""
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(target: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A plot's data."""
    with replacing(target) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_jsonl(target: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Data rows, one JSON object per line."""
    with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _swap(temporary: Path, target: Path) -> None:
    if target.is_dir():
        target.rename(_previous(target))
        temporary.rename(target)
        _remove(_previous(target))
    else:
        temporary.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _named_faults(target: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        fault = named_fault(error, target)
        if fault is error:
            raise
        raise fault from error
