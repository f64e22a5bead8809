"""Problems of a table as a whole, though each of its rows can be read."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

from training.preparation.conversations import RENDERED
from training.preparation.formats import Example
from training.preparation.sources import SourceRow

FEWEST_WINNERS = 20
"""Votes from which on one side that never wins is a doubt."""
SCORES = [
    (form.format(side="chosen", score=score), form.format(side="rejected", score=score))
    for form, score in product(
        ("{score}_{side}", "{side}_{score}", "{side}-{score}", "{score}-{side}"), ("score", "rating", "avg_rating")
    )
]
"""Columns with a score of the chosen, and of the rejected reply."""


class Doubts:
    """Counts doubtful rows of a table as they are read."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._rows = self._examples = 0
        self._contradicted: dict[tuple[str, str], list[int]] = {}
        """Two columns of scores -> number of rows that contradict them, and the first such row."""
        self._rendered: list[Any] = [0, None]
        self._first_shown: Counter[bool] = Counter()
        """Whether the preferred reply was shown first, for pairs whose order is known."""

    def row(self, row: SourceRow) -> None:
        self._rows += 1
        if not isinstance(row.content, dict):
            return
        for columns in SCORES:
            chosen, rejected = columns
            if chosen in row.content and _below(row.content[chosen], row.content.get(rejected)):
                self._contradicted.setdefault(columns, [0, row.number])[0] += 1

    def example(self, example: Example) -> None:
        self._examples += 1
        if isinstance(example.prompt, str) and _is_rendered(example.prompt):
            self._rendered = [self._rendered[0] + 1, self._rendered[1] or example.origin]
        self._first_shown.update(pair.chosen_first for pair in example.pairs if pair.chosen_first is not None)

    def lines(self) -> Iterator[str]:
        """A line for each doubt, with a count and a first place."""
        if columns := next((columns for columns in SCORES if columns in self._contradicted), None):
            count, first = self._contradicted[columns]
            yield (
                f"{columns[0]} is below {columns[1]} in {count:,} of {self._rows:,} rows "
                f"(first: {self._unit} {first}): the labels contradict the scores"
            )
        count, origin = self._rendered
        if count:
            yield (
                f"{count:,} of {self._examples:,} prompts look like a transcript or a rendered "
                f"template (first: {origin}): they would be rendered once more"
            )
        shown = self._first_shown.total()
        if shown >= FEWEST_WINNERS and len(self._first_shown) == 1:
            which = "second" if self._first_shown[True] else "first"
            yield f"the {which} reply never wins in {shown:,} votes: is `vote` read the right way?"


def _below(first: Any, second: Any) -> bool:
    numbers = (int, float)
    return isinstance(first, numbers) and isinstance(second, numbers) and first < second


_SPEAKERS = [re.compile(rf"(?:\A|\n)\s*(?:{names}):", re.IGNORECASE) for names in ("human|user", "assistant|ai|bot")]


def _is_rendered(prompt: str) -> bool:
    return RENDERED.search(prompt) is not None or all(speaker.search(prompt) for speaker in _SPEAKERS)
