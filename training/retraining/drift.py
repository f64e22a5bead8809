"""Drift of prompts: lengths and words. Pure functions.

Shapes: N new prompts, B prompts of before.
"""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import kolmogi

_WORD = re.compile(r"\w+")


def length_distance(new: Sequence[int], before: Sequence[int]) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: sup over x of |F_new(x) - F_before(x)|, of the two empirical
    distributions of lengths.

    Raises ValueError if either is empty.
    """
    from scipy.stats import ks_2samp  # imported late: 0.7 s that only retrain cycles need

    if not new or not before:
        raise ValueError("one of the two distributions of lengths is empty.")
    with np.errstate(all="ignore"):  # warns about its p-value, which is not used
        return float(ks_2samp(new, before, method="asymp").statistic)


def critical_distance(new: int, before: int, confidence: float) -> float:
    """The distance that two samples of one distribution exceed with probability 1 - confidence.

    K^-1(1 - confidence) sqrt((n + m) / (n m)) with K the survival function of Kolmogorov's distribution, for large
    samples; with ties, as in lengths, it is conservative. Source: Smirnov 1948, Table for estimating the goodness of
    fit of empirical distributions, Ann. Math. Stat. 19, 279-281.
    """
    return float(kolmogi(1 - confidence)) * math.sqrt((new + before) / (new * before))


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case. All numbers are one word: a new order number is not drift."""
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())]


def unseen_words(new: Iterable[str], before: Iterable[str]) -> tuple[int, int]:
    """Number of words in `new` that occur in no text of `before`, and the total number."""
    known_words = {word for text in before for word in words(text)}
    new_words = [word for text in new for word in words(text)]
    return sum(word not in known_words for word in new_words), len(new_words)
