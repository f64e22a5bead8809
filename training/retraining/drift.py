"""Are the prompts of today those of yesterday? Lengths and words, pure functions.

Shapes: N new prompts, B prompts of before.
"""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import kolmogi

_WORD = re.compile(r"\w+")


def length_distance(new: Sequence[int], before: Sequence[int]) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: sup over x of |F_new(x) - F_before(x)|, of the
    two empirical distributions of lengths.

    Raises ValueError if either is empty.
    """
    from scipy.stats import ks_2samp  # imported late: 0.7 s that only a retrain cycle needs

    if not new or not before:
        raise ValueError("one of the two distributions of lengths is empty.")
    with np.errstate(all="ignore"):  # in its p-value, which is not asked for
        return float(ks_2samp(new, before, method="asymp").statistic)


def critical_distance(new: int, before: int, confidence: float) -> float:
    """The distance that two samples of one distribution exceed with probability 1 - confidence.

    K^-1(1 - confidence) sqrt((n + m) / (n m)) with K the survival function of Kolmogorov's
    distribution, for large samples; with ties, as lengths have them, it errs on the wide side.
    Source: Smirnov 1948, Table for estimating the goodness of fit of empirical distributions, Ann.
    Math. Stat. 19, 279-281.
    """
    return float(kolmogi(1 - confidence)) * math.sqrt((new + before) / (new * before))


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
