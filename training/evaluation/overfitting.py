"""Whether training went on for too long, and the temperature of a pair model's confidence. Pure."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from training.evaluation.reliability import expected_calibration_error, reliability

Z = NormalDist().inv_cdf(0.95)
"""One-sided, at 5%."""
TEMPERATURES = (0.02, 50.0)


class RowLosses(NamedTuple):
    """Losses of held-out rows, [N] each."""

    sums: NDArray[np.float64]
    """Loss of each row, summed over what it is a mean of: its reply tokens, or its one pair."""
    weights: NDArray[np.float64]
    """How many that are."""

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.weights.sum())


def is_worse(later: RowLosses, best: RowLosses) -> bool:
    """Whether the loss rose since `best`, on the same rows: surely, by a paired z-test at 5%.

    d_i = later_i - best_i;  mean(d) > 1.645 std(d) / sqrt(N)
    """
    difference = later.sums / later.weights - best.sums / best.weights
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.inf
    return bool(difference.mean() > Z * error)


def fitted_temperature(margins: NDArray[np.float64]) -> float:
    """The temperature T with the least loss of sigmoid(margin / T) on these pairs; `margins` are those of the chosen
    over the rejected replies, [N]. Above 1 the model is too sure.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 4.2.
    """
    optimum = minimize_scalar(
        lambda log_t: float(np.logaddexp(0.0, -margins / np.exp(log_t)).mean()),
        bounds=tuple(np.log(TEMPERATURES)),
        method="bounded",
    )
    return float(np.exp(optimum.x))


def pair_losses(margins: NDArray[np.float64]) -> RowLosses:
    """-ln sigmoid(margin) of each pair; `margins` as in `fitted_temperature`."""
    return RowLosses(np.logaddexp(0.0, -margins), np.ones(len(margins)))


def calibrated(validation: NDArray[np.float64], test: NDArray[np.float64]) -> dict[str, float]:
    """The temperature that suits the validation pairs, and the calibration error of the test pairs at it."""
    temperature = fitted_temperature(validation)
    return {
        "temperature": temperature,
        "ece_at_temperature": expected_calibration_error(reliability(test / temperature)),
    }
