"""Are the prompts of today those of yesterday? Lengths and words, pure functions.

Shapes: N new prompts, B prompts of before.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+")


def length_distance(new: Sequence[int], before: Sequence[int]) -> float:
    """Kolmogorov-Smirnov: sup over x of |F_new(x) - F_before(x)|, of the two empirical
    distributions of lengths.

    Raises ValueError if either is empty.
    """
    if not new or not before:
        raise ValueError("a distribution needs at least one value")
    sorted_new, sorted_before = sorted(new), sorted(before)
    return max(
        abs(bisect_right(sorted_new, x) / len(new) - bisect_right(sorted_before, x) / len(before))
        for x in {*sorted_new, *sorted_before}
    )


def critical_distance(new: int, before: int, confidence: float) -> float:
    """The distance that two samples of one distribution exceed with probability 1 - confidence.

    c sqrt((n + m) / (n m)) with c = sqrt(-ln((1 - confidence) / 2) / 2), for large samples; with
    ties, as lengths have them, it errs on the wide side. Source: Smirnov 1948, Table for estimating
    the goodness of fit of empirical distributions, Ann. Math. Stat. 19, 279-281.
    """
    return math.sqrt(-math.log((1 - confidence) / 2) / 2) * math.sqrt(
        (new + before) / (new * before)
    )


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case. Numbers are one word: an order number never seen
    before is no news.
    """
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())]


def unseen_words(new: Iterable[str], before: Iterable[str]) -> tuple[int, int]:
    """How many words of the texts `new` stand in no text of `before`, and how many there are."""
    known = {word for text in before for word in words(text)}
    asked = [word for text in new for word in words(text)]
    return sum(word not in known for word in asked), len(asked)
