"""Fronts that a test starts, ended after it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.fronts import Served


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(export: Path, **settings: Any) -> Served:
        started.append(Served(tmp_path, export, **settings))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.end()
