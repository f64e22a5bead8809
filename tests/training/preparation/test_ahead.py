"""Items that another process makes."""

import os
from collections.abc import Iterator
from itertools import islice

import psutil
import pytest

from config.errors import DataError
from training.preparation.ahead import AT_ONCE, made_ahead


def test_items_come_whole_and_in_order_from_another_process() -> None:
    made = list(made_ahead(lambda: ((os.getpid(), n) for n in range(AT_ONCE * 2 + 3))))
    assert [n for _, n in made] == list(range(AT_ONCE * 2 + 3))
    assert len({pid for pid, _ in made}) == 1
    assert made[0][0] != os.getpid()
    assert list(made_ahead(lambda: [])) == []


def test_an_error_there_is_raised_here_after_what_came_before_it() -> None:
    def broken() -> Iterator[int]:
        yield from range(AT_ONCE)
        raise DataError("row 2001 is broken")

    items = made_ahead(broken)
    assert list(islice(items, AT_ONCE)) == list(range(AT_ONCE))
    with pytest.raises(DataError, match="row 2001 is broken"):
        next(items)


def test_who_wants_no_more_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    items = made_ahead(lambda: range(10**9))
    assert next(items) == 0
    assert len(set(psutil.Process().children()) - before) == 1
    items.close()  # type: ignore[attr-defined]
    assert set(psutil.Process().children()) == before
