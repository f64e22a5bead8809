"""Detects divergence of the loop; each message has the value and what to change."""

import math
from typing import TYPE_CHECKING

from config.errors import TrainingDiverged
from config.sections.online import Online

if TYPE_CHECKING:
    from training.rl.report import UpdateStatistics

MIN_ENTROPY_NATS = 1e-4
"""Nats per token. Below it every sample is the same, and there is nothing left to learn from."""
MAX_RATIO = 10.0
"""Mean probability ratio of an update; in a healthy one clipping keeps it within a few percent of 1."""
MAX_LOGPROB_GAP_NATS = 0.2
"""Mean over tokens of |sampling log-prob - training log-prob|. At this gap the ratio of an average token is at the
edge of the customary clip range (0.2) before the first step.
"""
MAX_NEGATIVE_KL_ERRORS = 5.0
"""Standard errors by which the mean KL of samples from the policy may fall below zero by chance."""

SAME_SCORE_SPREAD = 1e-6
"""Scores count as equal if their standard deviation over their mean is below this: fp32 rounds by 6e-8, and the mean
of equal numbers need not be that number.
"""


def check_rollout(statistics: dict[str, float], settings: Online, scored_by_function: bool = False) -> None:
    """Raise TrainingDiverged if nothing can be learnt from a rollout."""
    section = settings.method
    if any(math.isnan(value) or math.isinf(value) for value in statistics.values()):
        bad = next(name for name, value in statistics.items() if math.isnan(value) or math.isinf(value))
        raise TrainingDiverged(
            f"{section} {bad} is {statistics[bad]}: training diverged. Lower {section}.learning_rate in params.yaml."
        )
    gap = statistics["rollout_logprob_gap"]
    if gap > MAX_LOGPROB_GAP_NATS:
        raise TrainingDiverged(
            f"the log-probabilities of sampling and of training differ by {gap:.3g} nats per "
            f"token, more than {MAX_LOGPROB_GAP_NATS}: the sampler has other weights or another "
            f"precision. Set {section}.rollout_engine: static in params.yaml."
        )
    noise = SAME_SCORE_SPREAD * abs(statistics["score"])
    same = statistics["score_std"] <= noise and settings.batch_size > 1
    if same and not scored_by_function:  # of a function: none of the batch may be right yet
        raise TrainingDiverged(
            f"all {settings.batch_size} responses have the score {statistics['score']:.4g}: "
            "the reward model cannot tell them apart. Look at metrics/reward.json and train the reward stage again."
        )
    if statistics["kl"] < -MAX_NEGATIVE_KL_ERRORS * statistics["kl_error"] - 1e-3 and settings.batch_size > 1:
        raise TrainingDiverged(
            f"mean KL is {statistics['kl']:.3f} nats with a standard error of {statistics['kl_error']:.3f}, "
            "which samples from the policy cannot give: sampling and scoring disagree. "
            f"Check {section}.temperature and the tokenizer."
        )


def check_update(statistics: "UpdateStatistics", update: int, section: str = "ppo") -> None:
    """Raise TrainingDiverged if an update broke the policy; `section` names its settings in params.yaml."""
    if not math.isfinite(statistics.grad_norms[-1]):
        raise TrainingDiverged(
            f"the gradient norm is {statistics.grad_norms[-1]} in update {update}: the step was not taken. "
            f"Lower {section}.learning_rate in params.yaml; the last checkpoint is kept."
        )
    summary = statistics.summary()
    if summary["ratio"] > MAX_RATIO:
        raise TrainingDiverged(
            f"the mean ratio of new to old policy is {summary['ratio']:.3g} in update {update}: the policy ran away. "
            f"Lower {section}.learning_rate, or set {section}.target_kl in params.yaml."
        )
    if summary["entropy"] < MIN_ENTROPY_NATS:
        raise TrainingDiverged(
            f"entropy is {summary['entropy']:.2g} nats per token in update {update}: "
            f"the policy collapsed to one response. Raise {section}.kl.coef or lower {section}.learning_rate in "
            "params.yaml."
        )
