"""Token ids of prepared rows: an Arrow file beside each jsonl file of data/prepared, which stages map into memory.

data/prepared/<dataset>/<split>.arrow   a row for each line of <split>.jsonl, a list of ids a column

sft         prompt_ids, completion_ids
preference  prompt_ids, chosen_ids, rejected_ids
ratings     prompt_ids, completion_ids, label (1 for a good reply, 0 for a bad one)
prompts     prompt_ids
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from config.errors import DataError

ROWS_AT_ONCE, TOKENS_AT_ONCE = 10_000, 2_000_000
"""Rows of a record batch, or tokens of its last column: what is held before it is written."""
COLUMNS = {
    "sft": ("prompt_ids", "completion_ids"),
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "ratings": ("prompt_ids", "completion_ids", "label"),
    "prompts": ("prompt_ids",),
}
"""Dataset -> the columns of its files."""

T = TypeVar("T")
U = TypeVar("U")
Ids = list[int]


class TokenWriter:
    """Writes rows of token ids, a list for each of some columns."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._begin()

    def _begin(self) -> None:
        self._ids = [array("i") for _ in self._schema]
        self._ends = [array("i", [0]) for _ in self._schema]

    def add(self, row: Sequence[Sequence[int]]) -> None:
        for ids, ends, added in zip(self._ids, self._ends, row, strict=True):
            ids.extend(added)
            ends.append(len(ids))
        if len(ends) > ROWS_AT_ONCE or len(ids) > TOKENS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        columns = [
            pa.ListArray.from_arrays(np.asarray(ends), np.asarray(ids))
            for ids, ends in zip(self._ids, self._ends, strict=True)
        ]
        self._writer.write(pa.record_batch(columns, schema=self._schema))
        self._begin()

    def close(self) -> None:
        if len(self._ends[0]) > 1:
            self._write()
        self._writer.close()
        self._file.close()


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
        self._parts = {name: [_Part(chunk) for chunk in self._table[name].chunks] for name in self.columns}
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

    def beside(self, make: Callable[[int], U]) -> "Rows[U]":
        """What `make` gives for the same places of another table."""
        return Rows(self._places, make)

    def map(self, change: Callable[[T], U]) -> "Rows[U]":
        """The same rows, each changed."""
        return Rows(self._places, lambda place: change(self._make(place)))
