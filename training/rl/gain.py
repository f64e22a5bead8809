"""What the last updates have gained for their money: budget.min_gain_per_usd.

A score is the mean over the responses that an update sampled first, to prompts that come once in an epoch.
"""

import os
from collections.abc import Sequence
from math import fsum, sqrt
from typing import NamedTuple

from config.records import USD_PER_SECOND_VARIABLE
from training.distributed.collectives import all_reduce_max
from training.process.stage import Stage
from training.rl.state import PpoState

WINDOW = 5
"""Updates whose scores are compared with those of as many before."""
UPPER = 1.96
"""Standard errors to the upper end of a 95% interval."""


class Gain(NamedTuple):
    """Points of score a US dollar."""

    mean: float
    high: float


def gain_per_usd(history: Sequence[Sequence[float]], usd_per_second: float) -> Gain | None:
    """The gain of the last window over the one before, for what the last one cost; None before there are two.

    history: (score, squared standard error, seconds) of each update.
    """
    if len(history) < 2 * WINDOW:
        return None
    before, last = history[-2 * WINDOW : -WINDOW], history[-WINDOW:]
    scores = [fsum(score for score, _, _ in window) / WINDOW for window in (before, last)]
    error = sqrt(fsum(variance for window in (before, last) for _, variance, _ in window)) / WINDOW
    usd, gain = usd_per_second * fsum(seconds for _, _, seconds in last), scores[1] - scores[0]
    return Gain(gain / usd, (gain + UPPER * error) / usd)


def has_stopped_paying(stage: Stage, state: PpoState) -> Gain | None:
    """The gain at the end of a window if it is too little. Collective: the first process decides by its clock."""
    limit, price = stage.params.budget.min_gain_per_usd, float(os.environ.get(USD_PER_SECOND_VARIABLE, "0"))
    if limit is None or state.update % WINDOW:
        return None
    gain = gain_per_usd(state.history, price) if price else None
    too_little = gain is not None and gain.high < limit and stage.rank == 0
    return (gain or Gain(0.0, 0.0)) if all_reduce_max(float(too_little)) else None
