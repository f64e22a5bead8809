"""Quality of a reward model's preferences: accuracy and calibration."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 10


class Bin(NamedTuple):
    """Pairs with a confidence in one bin of [0.5, 1]."""

    confidence: float
    """Mean predicted probability of the reply the model prefers."""
    accuracy: float
    """Share of pairs with the same human preference."""
    pairs: int


def pair_accuracy(margins: NDArray[np.float64]) -> float:
    """Share of pairs whose chosen reply scores higher; a tie counts half. `margins`: chosen minus rejected score,
    [B].
    """
    return float(np.mean(margins > 0) + 0.5 * np.mean(margins == 0))


def reliability(margins: NDArray[np.float64]) -> list[Bin]:
    """Confidence against accuracy in BINS equal bins of confidence, empty bins left out.

    The model's probability that the chosen reply is preferred is sigmoid(margin), by Bradley-Terry; its confidence is
    the probability of the reply it prefers. `margins` are of unnormalised scores, [B].
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0) + 0.5 * (margins == 0)
    index = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    members = [index == i for i in range(BINS)]
    return [Bin(float(confidence[m].mean()), float(right[m].mean()), int(m.sum())) for m in members if m.any()]


def expected_calibration_error(bins: list[Bin]) -> float:
    """Mean distance between confidence and accuracy, weighted by the bins' counts. Source: Guo et al. 2017
    (arXiv:1706.04599), eq. 3.
    """
    total = sum(b.pairs for b in bins)
    return sum(b.pairs * abs(b.confidence - b.accuracy) for b in bins) / total
