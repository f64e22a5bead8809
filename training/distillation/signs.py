"""Detects divergence of distillation; each message has the value and what to change."""

import math
from collections.abc import Sequence

from config.errors import TrainingDiverged

WINDOW = 5
"""Updates averaged: a single batch is too noisy."""
MAX_LENGTH_RATIO = 2.0
"""Mean response length of the student over the teacher's. On-policy students drift to ever longer responses where each
token is rewarded for being likely.
"""
MIN_EOS_RATIO = 0.5
"""Share of responses that end, relative to the best so far."""


def check_responses(lengths: Sequence[float], eos_rates: Sequence[float], teacher_length: float | None) -> None:
    """Raise TrainingDiverged if the student's responses grow far beyond the teacher's, or ever fewer of them end.

    lengths, eos_rates  means of every update so far in which the student sampled
    teacher_length      mean length of the teacher's responses; None if it sampled none
    """
    if len(lengths) <= WINDOW:
        return
    length, first = _last(lengths), sum(lengths[:WINDOW]) / WINDOW
    if teacher_length is not None and length > MAX_LENGTH_RATIO * teacher_length and length > first:
        raise TrainingDiverged(
            f"the student's responses have grown to {length:.1f} tokens, the teacher's have {teacher_length:.1f}. "
            "Lower distill.lmbda or distill.learning_rate, or raise distill.sft_updates in params.yaml."
        )
    best = max(sum(eos_rates[i : i + WINDOW]) / WINDOW for i in range(len(eos_rates) - WINDOW + 1))
    ended = _last(eos_rates)
    if ended < MIN_EOS_RATIO * best:
        raise TrainingDiverged(
            f"only {ended:.0%} of the student's responses end, after {best:.0%} before. Lower "
            "distill.lmbda or distill.learning_rate, or raise distill.sft_updates in params.yaml."
        )


def check_step(loss: float, grad_norm: float, update: int) -> None:
    """Raise TrainingDiverged if loss or gradient are not finite."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"the {name} is {value} in update {update} of distill. Lower "
                "distill.learning_rate in params.yaml; the last checkpoint is kept."
            )


def _last(values: Sequence[float]) -> float:
    return sum(values[-WINDOW:]) / WINDOW
