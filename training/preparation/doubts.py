"""What may be wrong with a table as a whole, though each of its rows can be read."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from training.preparation.conversations import RENDERED
from training.preparation.formats import Example
from training.preparation.sources import Table

FEWEST_WINNERS = 20
"""Votes from which on one side that never wins is a doubt."""
SCORES = [
    (form.format(side="chosen", score=score), form.format(side="rejected", score=score))
    for form, score in product(
        ("{score}_{side}", "{side}_{score}", "{side}-{score}", "{score}-{side}"),
        ("score", "rating", "avg_rating"),
    )
]
"""Columns with a score of the chosen, and of the rejected reply."""


def doubts(table: Table, examples: Sequence[Example]) -> tuple[str, ...]:
    """A line for each, with a count and a first place."""
    return tuple(filter(None, (_contradicted(table), _rendered(examples), _one_sided(examples))))


def _contradicted(table: Table) -> str | None:
    for chosen, rejected in SCORES:
        found = [
            row.number
            for row in table.rows
            if isinstance(row.content, dict)
            and chosen in row.content
            and _below(row.content[chosen], row.content.get(rejected))
        ]
        if found:
            return (
                f"{chosen} is below {rejected} in {len(found):,} of {len(table.rows):,} rows "
                f"(first: {table.unit} {found[0]}): the labels contradict the scores"
            )
    return None


def _below(first: Any, second: Any) -> bool:
    numbers = (int, float)
    return isinstance(first, numbers) and isinstance(second, numbers) and first < second


def _rendered(examples: Sequence[Example]) -> str | None:
    found = [
        example
        for example in examples
        if isinstance(example.prompt, str) and _is_rendered(example.prompt)
    ]
    if not found:
        return None
    return (
        f"{len(found):,} of {len(examples):,} prompts look like a transcript or a rendered "
        f"template (first: {found[0].origin}): they would be rendered once more"
    )


_SPEAKERS = [re.compile(rf"(?:\A|\n)\s*(?:{names}):", re.IGNORECASE)
             for names in ("human|user", "assistant|ai|bot")]  # fmt: skip


def _is_rendered(prompt: str) -> bool:
    return RENDERED.search(prompt) is not None or all(
        speaker.search(prompt) for speaker in _SPEAKERS
    )


def _one_sided(examples: Sequence[Example]) -> str | None:
    known = [pair.chosen_first for each in examples for pair in each.pairs]
    shown = [first for first in known if first is not None]
    if len(shown) < FEWEST_WINNERS or len(set(shown)) > 1:
        return None
    which = ("first", "second")[shown[0]]
    return f"the {which} reply never wins in {len(shown):,} votes: is `vote` read the right way?"
