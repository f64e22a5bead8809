"""Why the same phase cost more or less in another run: more tokens, another rate, another price.
Pure.

usd = tokens x (device_seconds / tokens) x usd_per_device_hour / 3600. The difference of two such
products is shared out among its factors so that the shares add up to it exactly, whichever run is
named first:

share of a factor x = L(usd_b, usd_a) x ln(x_b / x_a),  L(b, a) = (b - a) / (ln b - ln a)

Source: the logarithmic mean Divisia index, Ang 2005, The LMDI approach to decomposition analysis: a
practical guide, Energy Policy 33.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costs.ledger.ledger import Ledger, PhaseCost, StageCost
from costs.tables.price import usd_of

TOKENS, RATE, SECONDS, PRICE, PHASES = "tokens", "rate", "seconds", "price", "phases"
"""Reasons: more or fewer tokens, another rate in tokens/s, another time where no tokens are
counted, another price, and phases (or stages) that only one of the runs has.
"""


class Work(NamedTuple):
    """Work and cost of a phase, or a sum of phases, in one run."""

    device_seconds: float
    tokens: int
    usd_per_device_hour: float

    @property
    def usd(self) -> float:
        return usd_of(self.device_seconds, self.usd_per_device_hour)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second and device; None where no tokens are counted."""
        return self.tokens / self.device_seconds if self.tokens and self.device_seconds else None


@dataclass(frozen=True)
class CostChange:
    """A phase, a stage (`phase` is empty) or the run (`stage` is empty too) in two runs; None where
    a run lacks it.
    """

    stage: str
    phase: str
    before: Work | None
    after: Work | None
    reasons: Mapping[str, float]
    """Reason -> its share of `usd`, in US dollars; they add up to it."""
    phases: Sequence["CostChange"] = field(default=())

    @property
    def usd(self) -> float:
        """after - before, where a missing phase costs nothing."""
        return (self.after.usd if self.after else 0.0) - (self.before.usd if self.before else 0.0)


def log_mean(a: float, b: float) -> float:
    """(b - a) / (ln b - ln a), which is a where they are equal; a, b > 0."""
    return a if math.isclose(a, b, rel_tol=1e-12) else (b - a) / math.log(b / a)


def reasons(before: Work, after: Work) -> dict[str, float]:
    """Reason -> its share of after.usd - before.usd.

    A run without a price, or without time, has no logarithm: the entire difference is then the
    price's, or the time's.
    """
    if not before.usd or not after.usd:
        free = bool(before.device_seconds and after.device_seconds)
        return (
            {PRICE if free else SECONDS: after.usd - before.usd} if before.usd != after.usd else {}
        )
    mean = log_mean(before.usd, after.usd)
    shares = {PRICE: mean * math.log(after.usd_per_device_hour / before.usd_per_device_hour)}
    if before.tokens and after.tokens:
        shares[TOKENS] = mean * math.log(after.tokens / before.tokens)
        per_token = (after.device_seconds / after.tokens) / (before.device_seconds / before.tokens)
        return shares | {RATE: mean * math.log(per_token)}
    return shares | {SECONDS: mean * math.log(after.device_seconds / before.device_seconds)}


def cost_changes(before: Ledger, after: Ledger) -> list[CostChange]:
    """Every stage of either run with its phases, then the sum over the stages (`stage` is empty).

    Compared is the work that made a stage's outputs, done once, whichever run paid for it; of a
    stage that has none yet, what it took so far. So a stage that one run found unchanged is no
    difference.
    """
    names = dict.fromkeys(stage.stage for book in (before, after) for stage in book.stages)
    stages = [_stage(name, _works(before, name), _works(after, name)) for name in names]
    return [*stages, _sum("", stages)]


def _works(book: Ledger, name: str) -> dict[str, Work]:
    """Phase -> its work; empty if the run has not got the stage, or its cost is not known here."""
    stage = book.stage(name)
    if stage is None:
        return {}
    return {
        phase.phase: _work(phase, stage, stage.usd_per_device_hour)
        for phase in stage.made or stage.phases
    }


def _work(phase: PhaseCost, stage: StageCost, price: float) -> Work:
    paid = max(stage.world_size, stage.rented)
    seconds = phase.usd * 3600 / price if price else phase.seconds * paid
    return Work(seconds, phase.tokens, price)


def _stage(name: str, before: Mapping[str, Work], after: Mapping[str, Work]) -> CostChange:
    phases = [
        _phase(name, phase, before.get(phase), after.get(phase))
        for phase in dict.fromkeys([*before, *after])
    ]
    return _sum(name, phases)


def _phase(stage: str, phase: str, before: Work | None, after: Work | None) -> CostChange:
    if before is not None and after is not None:
        return CostChange(stage, phase, before, after, reasons(before, after))
    alone = CostChange(stage, phase, before, after, {})
    return CostChange(stage, phase, before, after, {PHASES: alone.usd})


def _sum(stage: str, parts: Sequence[CostChange]) -> CostChange:
    shares: dict[str, float] = {}
    for part in parts:
        for reason, usd in part.reasons.items():
            shares[reason] = shares.get(reason, 0.0) + usd
    return CostChange(
        stage,
        "",
        _total(part.before for part in parts),
        _total(part.after for part in parts),
        shares,
        parts if stage else (),
    )


def _total(works: Iterable[Work | None]) -> Work | None:
    known = [work for work in works if work is not None]
    if not known:
        return None
    seconds, usd = sum(work.device_seconds for work in known), sum(work.usd for work in known)
    # stages may have prices of their own
    price = usd * 3600 / seconds if seconds else known[0].usd_per_device_hour
    return Work(seconds, sum(work.tokens for work in known), price)
