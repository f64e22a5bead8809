"""Which reply a vote is for, never guessed: a column of winners is read only if its values say it, or the convention
is named.

by themselves  one of the two texts; the name of a reply's column; A, model_b, first, right ...;
               1 and 2
index0         0 is the first reply, 1 the second; with 2, that is a tie
index1         1 is the first reply, 2 the second, 0 a tie: as `rlhf label` writes them
negative-first, positive-first
               a number below, or above, 0 is for the first reply
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from config.errors import DataError
from config.terminal_text import shown
from training.preparation.cleaning import Refused

WORD = re.compile(
    r"(?:model|response|assistant|answer|output|reply|option|completion|text)?[ _-]?"
    r"(?:(?P<first>a|first|left)|(?P<second>b|second|right)|(?P<number>[012])|"
    r"(?P<tie>tie.*|draw|both.*|neither.*|equal|same|none))"
)
NAMED = ("text", "name", "words")
"""Conventions that values show by themselves, the most certain first."""
CONVENTIONS = ("index0", "index1", "negative-first", "positive-first")
"""Allowed values of `vote` in a source."""

Replies = tuple[str, str]


def winner(value: Any, convention: str, columns: Replies, replies: Sequence[Any]) -> int:
    """1 or 2, the reply that a vote is for; 0 for a tie. `columns` are the names of the columns of the two `replies`.

    Raises Refused for a value that is no vote in the convention.
    """
    number = _winner(value, convention, columns, replies)
    if number is None:
        raise Refused("not_a_vote", "", f"{shown(value)} is no vote ({convention})")
    return number


def _winner(value: Any, convention: str, columns: Replies, replies: Sequence[Any]) -> int | None:
    if convention in ("text", "name"):
        names = list(replies if convention == "text" else columns)
        if value in names and names[0] != names[1]:
            return 1 + names.index(value)
        return 0 if _word(value) == "tie" else None
    number = None if value is True or value is False else _number(value)
    if convention in ("negative-first", "positive-first"):
        if number is None:
            return None
        return 0 if number == 0 else 1 if (number < 0) == (convention == "negative-first") else 2
    word = _word(value)
    if word in ("first", "second", "tie"):
        return ("tie", "first", "second").index(word)
    if number is None and (word is not None or convention == "index0"):
        number = float(word) if word is not None else _number(value)
    known_numbers = {"index0": (1, 2, 0), "index1": (0, 1, 2)}.get(convention)
    if known_numbers is None or number not in (0, 1, 2):
        return None
    return known_numbers[int(number)]


def _word(value: Any) -> str | None:
    """first, second, tie or the digits of a text that says who wins."""
    match = WORD.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        return None
    return match["number"] or next(name for name in ("first", "second", "tie") if match[name])


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    usable = isinstance(value, int | float) and not math.isnan(value)
    return float(value) if usable else None


def convention_of(votes: Iterable[tuple[Any, Sequence[Any]]], columns: Replies, place: str, column: str) -> str:
    """The convention of a column of winners, from all its values, each with the two replies of its row; what is no
    vote in any is left to be refused.

    Raises DataError where the values can be read in two ways, with both readings of one of them.
    """
    count = 0
    readable: Counter[str] = Counter()
    """Convention that values show by themselves -> values that are a vote in it."""
    decided: set[str] = set()
    """Conventions in which some vote is not a tie."""
    words: set[str | None] = set()
    numbers: set[float] = set()
    shown: tuple[Any, Sequence[Any]] | None = None
    """The first vote that is not zero, or the first of all."""
    for value, replies in votes:
        count += 1
        for convention in NAMED[:2]:
            won = _winner(value, convention, columns, replies)
            readable[convention] += won is not None
            decided |= {convention} if won else set()
        word, number = _word(value), _number(value)
        words.add(word)
        if shown is None or (_number(shown[0]) in (None, 0.0) and number not in (None, 0.0)):
            shown = value, replies
        if number is None and word in ("0", "1", "2"):
            number = float(word) if word != "0" else -math.inf  # model_0 is a model, not a tie
        if number is not None:
            numbers.add(number)
    for convention in NAMED[:2]:
        if convention in decided and 2 * readable[convention] > count:
            return convention
    if not numbers or shown is None:
        return "words"
    if -math.inf in numbers and not numbers - {-math.inf, 1.0}:
        return "index0"
    numbers = {max(number, 0.0) if number == -math.inf else number for number in numbers}
    sides = words & {"first", "second"}
    if numbers in ({1.0, 2.0}, {2.0}) or (sides and numbers == {0.0}):
        return "index1"
    raise DataError(_two_readings(shown, columns, numbers, place, column))


def _two_readings(
    vote: tuple[Any, Sequence[Any]], columns: Replies, numbers: set[float], place: str, column: str
) -> str:
    signed = min(numbers) < 0 or max(numbers) > 2 or any(number % 1 for number in numbers)
    ways = CONVENTIONS[2:] if signed else CONVENTIONS[:2]
    value, replies = vote
    won = {way: _winner(value, way, columns, replies) for way in ways}
    readings = "; ".join(
        f"--vote {way}: {shown(value)} is {_cut(replies[said - 1]) if said else 'a tie'}"
        for way, said in won.items()
        if said is not None
    )
    values = ", ".join(f"{number:g}" for number in sorted(numbers)[:7])
    return (
        f"{place}: column {shown(column)} holds {values}, which can be read in two ways. In its first "
        f"row with {shown(value)}, {readings}. Say which with --vote, or `vote` of the source in "
        "params.yaml; see the card of the data."
    )


def _cut(text: Any) -> str:
    return shown(" ".join(str(text).split()))
