"""Agreement of annotators: pure functions of their votes.

Votes are categories without an order (1, 2, or 0 for a tie); a pair that an annotator skipped or has not seen is
missing.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

Unit = Mapping[str, Hashable]
"""One judged item: annotator -> category."""


class Couple(NamedTuple):
    """Two annotators on the items both judged."""

    first: str
    second: str
    units: int
    agreement: float
    """Fraction of items with the same answer."""
    kappa: float | None
    """Cohen's kappa; None where chance alone would give full agreement."""


def couples(units: Sequence[Unit]) -> list[Couple]:
    """Every two annotators with at least one item in common, by name."""
    names = sorted({name for unit in units for name in unit})
    pairs = []
    for first, second in combinations(names, 2):
        both = [(unit[first], unit[second]) for unit in units if first in unit and second in unit]
        if both:
            pairs.append(Couple(first, second, len(both), sum(a == b for a, b in both) / len(both), cohen_kappa(both)))
    return pairs


def observed_agreement(units: Sequence[Unit]) -> float | None:
    """Fraction of pairs of judgements on the same item that agree; None if no item has two."""
    same = pairs = 0
    for unit in units:
        counts = Counter(unit.values())
        judged = sum(counts.values())
        same += sum(n * (n - 1) for n in counts.values())
        pairs += judged * (judged - 1)
    return same / pairs if pairs else None


def cohen_kappa(both: Sequence[tuple[Hashable, Hashable]]) -> float | None:
    """Agreement of two annotators beyond chance: (p_o - p_e) / (1 - p_e).

    p_o is the fraction of units on which they agree, p_e the sum over categories of the product of the two annotators'
    own fractions. 1 is full agreement, 0 that of chance. None if p_e is 1 or there is no unit.

    Source: Cohen, A coefficient of agreement for nominal scales, 1960, doi 10.1177/001316446002000104, equation 1.
    """
    if not both:
        return None
    firsts, seconds = Counter(a for a, _ in both), Counter(b for _, b in both)
    expected_couples = sum(count * seconds[category] for category, count in firsts.items())
    if expected_couples == len(both) ** 2:
        return None
    expected = expected_couples / len(both) ** 2
    return (sum(a == b for a, b in both) / len(both) - expected) / (1 - expected)


def krippendorff_alpha(units: Sequence[Unit]) -> float | None:
    """Agreement of any number of annotators beyond chance, judgements may be missing: 1 - D_o / D_e, nominal
    categories.

    With o_ck the coincidences of categories c and k (each couple of judgements of a unit with m of them counts 1 / (m
    - 1)), n_c their sums and n the sum of all: D_o = sum over c != k of o_ck / n, D_e = sum over c != k of n_c n_k /
    (n (n - 1)). Units with fewer than two judgements say nothing and are left out. None without a unit of two, or with
    a single category.

    Source: Krippendorff, Computing Krippendorff's alpha-reliability, 2011, section C.
    """
    by_category: Counter[Hashable] = Counter()
    disagreement = 0.0
    for unit in units:
        counts = Counter(unit.values())
        judged = sum(counts.values())
        if judged < 2:
            continue
        by_category += counts
        disagreement += sum(n * (judged - n) for n in counts.values()) / (judged - 1)
    total = sum(by_category.values())
    expected = sum(n * (total - n) for n in by_category.values())
    return 1 - (total - 1) * disagreement / expected if expected else None
