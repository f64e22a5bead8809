"""Conclusions from a comparison of variants: which are as good as the baseline, which are worth
their cost, and how well the planner ranked them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import NamedTuple

GOLD_MARGIN, WIN_RATE_MARGIN = 0.02, 0.03
"""How much lower the quality of a variant may be and still count as the same: 0.02 of gold score,
or three points of win rate. Chosen before any run.
"""
CLOSE = 1.3
"""Costs within this factor are a tie: neither order of the two is wrong."""
WINDOW = 400
"""Fewest responses for an estimate of quality during training."""


def margin(judge: str) -> float:
    """The margin of a judge, `gold` or `win_rate`."""
    return GOLD_MARGIN if judge == "gold" else WIN_RATE_MARGIN


class Scored(NamedTuple):
    """Scores of the responses of one update, which the policy before that update sampled."""

    update: int
    mean: float
    std: float
    n: int


def first_update_at(curve: Sequence[Scored], target: float, confidence: float) -> int | None:
    """Updates that were made when the lower bound of the quality first reached `target`; None if it
    never did. The quality is that of the last responses sampled, WINDOW at least.

    The bound is one-sided and of each moment: the first of many moments to reach a target comes a
    little too early.
    """
    z = NormalDist().inv_cdf(confidence)
    for end in range(1, len(curve) + 1):
        window, n = [], 0
        for each in reversed(curve[:end]):
            window.append(each)
            n += each.n
            if n >= WINDOW:
                break
        else:
            continue
        mean = sum(each.mean * each.n for each in window) / n
        variance = sum((each.std**2 + (each.mean - mean) ** 2) * each.n for each in window) / n
        if mean - z * (variance / n) ** 0.5 >= target:
            return curve[end - 1].update - 1
    return None


@dataclass(frozen=True)
class Costed:
    """A variant that was trained."""

    name: str
    planned_usd: float
    measured_usd: float
    same_quality: bool
    quality: float


class Ranking(NamedTuple):
    """Share of pairs that the planner ranked correctly."""

    right: int
    pairs: int
    wrong: tuple[tuple[str, str], ...]
    """(the cheaper as measured, the one that the plan says is cheaper)."""

    @property
    def share(self) -> float | None:
        return self.right / self.pairs if self.pairs else None


def ranking(costed: Sequence[Costed]) -> Ranking:
    """Over all pairs whose measured costs differ by more than CLOSE."""
    right, pairs, wrong = 0, 0, []
    for one, other in combinations(costed, 2):
        low, high = sorted((one, other), key=lambda each: each.measured_usd)
        if high.measured_usd <= CLOSE * low.measured_usd:
            continue
        pairs += 1
        if low.planned_usd < high.planned_usd:
            right += 1
        else:
            wrong.append((low.name, high.name))
    return Ranking(right, pairs, tuple(wrong))


class Choice(NamedTuple):
    """The planned cheapest variant, and its excess cost."""

    name: str
    regret: float
    """Its measured cost over that of the cheapest, minus one."""
    best: str
    """The cheapest as measured."""


def choice(costed: Sequence[Costed]) -> Choice | None:
    """Among the variants of the same quality; None if there is none."""
    same = [each for each in costed if each.same_quality]
    if not same:
        return None
    chosen = min(same, key=lambda each: each.planned_usd)
    best = min(same, key=lambda each: each.measured_usd)
    return Choice(chosen.name, chosen.measured_usd / best.measured_usd - 1, best.name)


def pareto(costed: Sequence[Costed]) -> list[str]:
    """Names of the Pareto-optimal variants in cost and quality, cheapest first."""
    kept: list[Costed] = []
    for each in sorted(costed, key=lambda each: (each.measured_usd, -each.quality)):
        if not kept or each.quality > kept[-1].quality:
            kept.append(each)
    return [each.name for each in kept]
