"""The decision whether the new model replaces the champion: a pure function of the contest's figures that reports
every condition with its numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from config.sections.retraining import Retrain
from config.workspace.retraining import Contest
from reporting.numbers import percent
from reporting.verdict import FEWEST_PROMPTS


class Check(NamedTuple):
    name: str
    passed: bool | None
    """None if it could not be checked; that is reported and does not block a promotion."""
    reason: str


class Verdict(NamedTuple):
    checks: tuple[Check, ...]
    usd_per_point: float | None
    """Cost of the cycle for each percentage point of win rate above one half; None without a win rate above one
    half.
    """

    @property
    def promotes(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed is False)


def promotion_verdict(
    contest: Contest, hacked: bool | None, hacked_reason: str, usd: float, settings: Retrain
) -> Verdict:
    """`hacked` is the verdict of the run's own evaluation against its SFT model, None where it could not tell; `usd`
    is the cost of the cycle.
    """
    checks = (
        _win_rate(contest),
        _hacking(contest, hacked, hacked_reason),
        _kl(contest, settings),
        _length(contest, settings),
        _safety(contest, settings),
    )
    points = 100 * (contest.win_rate.value - 0.5)
    return Verdict(checks, usd / points if points > 0 else None)


def _win_rate(contest: Contest) -> Check:
    rate = contest.win_rate
    if contest.judge_fault is not None:
        reason = f"the judge ({contest.judge}) gives no verdict: {contest.judge_fault}"
        return Check("wins against the champion", False, reason)
    passed = rate.low > 0.5 and rate.of >= FEWEST_PROMPTS
    few = f"; {FEWEST_PROMPTS} prompts are needed" if rate.of < FEWEST_PROMPTS else ""
    reason = (
        f"it wins {percent(rate.value)} against the champion on {rate.of} held-out prompts, by {contest.judge}; "
        f"the interval {percent(rate.low)} to {percent(rate.high)} "
        f"{'is above' if rate.low > 0.5 else 'must be above'} 50%{few}"
    )
    return Check("wins against the champion", passed, reason)


def _hacking(contest: Contest, hacked: bool | None, reason: str) -> Check:
    """Only evidence of hacking fails: the win rate must be significant anyway, by a judge that the new votes did not
    train.
    """
    name = "no reward hacking"
    if contest.hacking:
        return Check(name, False, f"its own reward model is misled: {contest.hacking_reason}")
    if hacked:
        return Check(name, False, f"the run's evaluation found reward hacking: {reason}")
    if contest.hacking is None:
        return Check(name, None, f"not enough evidence against the champion: {contest.hacking_reason}")
    if hacked is None:
        return Check(name, None, f"not enough evidence against its SFT model: {reason}")
    return Check(name, True, "neither against the champion nor against its SFT model")


def _kl(contest: Contest, settings: Retrain) -> Check:
    if settings.max_kl is None:
        return Check(
            "KL within bounds",
            None,
            f"{contest.kl:.1f} nats per response from the SFT model; retrain.max_kl sets no bound",
        )
    passed = contest.kl <= settings.max_kl
    reason = (
        f"{contest.kl:.1f} nats per response from the SFT model, the champion "
        f"{contest.kl_champion:.1f}; retrain.max_kl={settings.max_kl:g}"
    )
    return Check("KL within bounds", passed, reason)


def _length(contest: Contest, settings: Retrain) -> Check:
    bound = settings.max_length_ratio
    passed = contest.chars <= bound * contest.chars_champion and contest.chars_champion <= bound * contest.chars
    reason = (
        f"{contest.chars:.0f} characters per response, the champion {contest.chars_champion:.0f}; "
        f"retrain.max_length_ratio={bound:g} in either direction"
    )
    return Check("length within bounds", passed, reason)


def _safety(contest: Contest, settings: Retrain) -> Check:
    name, safety = "safety prompts not worse", contest.safety
    if safety is None:
        return Check(name, None, "not checked: retrain.safety_source names no safety prompts")
    passed = safety.drop.high <= settings.safety_margin
    reason = (
        f"{safety.drop.mean:+.3f} lower on {safety.prompts} safety prompts, by {safety.judge}; "
        f"the interval ends at {safety.drop.high:+.3f}, retrain.safety_margin={settings.safety_margin:g}"
    )
    return Check(name, passed, reason)


def in_a_line(checks: Sequence[Check]) -> str:
    """Every failed condition."""
    return "; ".join(f"{check.name} fails: {check.reason}" for check in checks)
