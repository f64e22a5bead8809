"""The longest files first: a worker of xdist that takes one last keeps the others waiting."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).parent / "durations.json"
SHORTEST_SECONDS = 2.0
"""Files below it are not recorded; they are what fills the ends."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(nodeids: Iterable[str], seconds: dict[str, float]) -> list[int]:
    """Positions of the tests: a file keeps its order, files come by their recorded seconds."""
    spent = [seconds.get(file_of(nodeid), 0.0) for nodeid in nodeids]
    return sorted(range(len(spent)), key=lambda place: -spent[place])


def recorded() -> dict[str, float]:
    return dict(json.loads(DURATIONS.read_text(encoding="utf-8")))


def record(reports: Iterable[Any], seconds: dict[str, float]) -> dict[str, float]:
    """What is recorded after a session: the sum of setups, calls and teardowns of each of its files; the others as
    they were.
    """
    summed: dict[str, float] = defaultdict(float)
    for report in reports:
        summed[file_of(report.nodeid)] += report.duration
    merged = {**seconds, **summed}
    return {file: round(spent) for file, spent in sorted(merged.items()) if spent >= SHORTEST_SECONDS}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the seconds of each file to {DURATIONS.name}, by which files are ordered",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = longest_first((item.nodeid for item in items), recorded())
    items[:] = [items[place] for place in order]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--record-durations"):
        reports = [report for value in terminalreporter.stats.values() for report in value if hasattr(report, "when")]
        text = json.dumps(record(reports, recorded()), indent=1)
        DURATIONS.write_text(text + "\n", encoding="utf-8")
