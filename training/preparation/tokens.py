"""Token ids of prepared rows: an Arrow file beside each jsonl file of data/prepared, which stages
map into memory.

data/prepared/<dataset>/<split>.arrow   a row for each line of <split>.jsonl, a list of ids a column

sft         prompt_ids, completion_ids
preference  prompt_ids, chosen_ids, rejected_ids
prompts     prompt_ids
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from config.errors import DataError

ROWS_AT_ONCE = 10_000
"""Rows of a record batch: what is held before it is written."""
COLUMNS = {
    "sft": ("prompt_ids", "completion_ids"),
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "prompts": ("prompt_ids",),
}
"""Dataset -> the columns of its files."""

T = TypeVar("T")
U = TypeVar("U")
Ids = list[int]


def write_tokens(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[Sequence[int]]]
) -> None:
    """Write rows of token ids, a list for each of `columns`."""
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        ahead = iter(rows)
        while part := list(islice(ahead, ROWS_AT_ONCE)):
            lists = [
                pa.array(list(column), pa.list_(pa.int32())) for column in zip(*part, strict=True)
            ]
            writer.write(pa.record_batch(lists, schema=schema))


class TokenTable:
    """The rows of a file, read where they lie on disk: it holds none of them."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is missing or damaged."""
        try:
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read ({' '.join(str(error).split())[:120]}). Run the data stage."
            ) from None
        self.columns: tuple[str, ...] = tuple(self._table.column_names)
        self._parts = {name: [_Part(chunk) for chunk in self._table[name].chunks]
                       for name in self.columns}  # fmt: skip
        sizes = [len(part) for part in self._parts[self.columns[0]]]
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Tokens of every row, [rows]."""
        parts = [part.lengths for part in self._parts[column]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def row(self, place: int) -> dict[str, Ids]:
        """The ids of one row, by column."""
        part = int(np.searchsorted(self._ends, place, side="right"))
        at = place - (int(self._ends[part - 1]) if part else 0)
        return {name: parts[part][at] for name, parts in self._parts.items()}


class _Part:
    """A column of one record batch."""

    def __init__(self, chunk: Any) -> None:
        self._offsets = np.asarray(chunk.offsets)
        self._values = np.asarray(chunk.values)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, place: int) -> Ids:
        ids: Ids = self._values[self._offsets[place] : self._offsets[place + 1]].tolist()
        return ids

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._offsets).astype(np.int64)


class Rows(Sequence[T]):
    """Rows that are made as they are asked for, from their places in a table."""

    def __init__(self, places: NDArray[np.int64], make: Callable[[int], T]) -> None:
        self._places, self._make = places, make

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> "Rows[T]": ...
    def __getitem__(self, place: int | slice) -> "T | Rows[T]":
        if isinstance(place, slice):
            return Rows(self._places[place], self._make)
        return self._make(int(self._places[place]))

    def __iter__(self) -> Iterator[T]:
        return (self._make(int(place)) for place in self._places)

    def map(self, change: Callable[[T], U]) -> "Rows[U]":
        """The same rows, each changed."""
        return Rows(self._places, lambda place: change(self._make(place)))
