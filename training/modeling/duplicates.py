"""Leaves out duplicates of texts that are not held in memory: by their digests, and by reading them twice."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Reread(Generic[T]):
    """Items that are made anew each time they are iterated."""

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return iter(self._make())


def digest(*texts: str) -> int:
    """64 bits of texts: of a million different rows, two share them once in 37 million times."""
    hashed = hashlib.blake2b(digest_size=8)
    for text in texts:
        content = text.encode()
        hashed.update(b"%d:" % len(content))
        hashed.update(content)
    return int.from_bytes(hashed.digest())


def first_of_each(texts: Iterable[str]) -> Iterator[str]:
    """Each text once, where it comes first; of those before, a digest is held."""
    digests: set[int] = set()
    for text in texts:
        value = digest(text)
        if value not in digests:
            digests.add(value)
            yield text


def first_occurrences(digests: Sequence[int]) -> NDArray[np.bool_]:
    """Whether each digest is the first of its value, [digests]."""
    values = np.asarray(digests, dtype=np.uint64)
    first = np.zeros(len(values), dtype=bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first
