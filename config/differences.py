"""Differences between two params, and a watch on params.yaml during a stage.

DVC reads params.yaml again when a stage's process has ended, and records its values at that time as those that made
the outputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.compose import flat
from config.load import load
from config.schema import Params

ABSENT = "absent"
MOST_NAMED = 4


class Difference(NamedTuple):
    key: str
    """Dotted, as in data.source.path."""
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Keys whose values differ, in file order."""
    old, new = dict(flat(before)), dict(flat(after))
    candidates = (Difference(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new})
    return [difference for difference in candidates if difference.before != difference.after]


def in_a_line(changed: Sequence[Difference], most: int = MOST_NAMED) -> str:
    """`seed 1 -> 2, sft.epochs 2.0 -> 3.0 and 5 more`."""
    more = f" and {len(changed) - most} more" if len(changed) > most else ""
    return ", ".join(str(difference) for difference in changed[:most]) + more


def sections_of(params: Params, sections: Sequence[str]) -> dict[str, Any]:
    """The named sections, or dotted keys within them, as in the file."""
    content = params.model_dump(mode="json")
    return {key: value_at(content, key) for key in sections}


def value_at(content: Mapping[str, Any], dotted: str) -> Any:
    """The value of a key such as `data.source.kind`."""
    node: Any = content
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


class Watched:
    """Watches that params.yaml keeps the values of `sections` with which a stage began."""

    def __init__(self, path: Path, began: Params, sections: Sequence[str]) -> None:
        self._path, self._sections = path, sections
        self._began = sections_of(began, sections)
        self._seen: tuple[int, int, int] | None = None
        self._differences: list[Difference] = []

    def differences(self) -> list[Difference]:
        """Keys that have changed since; the file is read only if it was written. Raises ParamsError if it cannot be
        read.
        """
        status = self._path.stat() if self._path.exists() else None
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino) if status else None
        if stamp is None or stamp != self._seen:
            self._differences = differences(self._began, sections_of(load(self._path), self._sections))
            self._seen = stamp
        return self._differences
