"""The decision whether to train again: a pure function of data and money, with its reasons in words."""

from typing import NamedTuple

from config.sections.retraining import Retrain
from config.workspace.retraining import Examination
from reporting.numbers import percent, usd
from tasks.run.purse import Month


class Decision(NamedTuple):
    train: bool
    reasons: tuple[str, ...]
    """Reasons for it if it is done, against it if not; the first is a summary in one line."""


def decide(
    examination: Examination, planned_usd: float | None, month: Month, settings: Retrain, forced: bool = False
) -> Decision:
    """Train if there is a reason and the month's money suffices.

    `planned_usd` is None where no plan can be made: with a monthly limit that is a reason not to. `forced` stands for
    a reason to train, never for money.
    """
    speaking = list(reasons_to_train(examination, settings))
    if forced:
        speaking.append("asked for")
    if not speaking:
        return Decision(False, (not_enough(examination, settings),))
    if month.left_usd is not None:
        if planned_usd is None:
            return Decision(
                False,
                (
                    "no plan can be made, so it is not known whether "
                    f"retrain.monthly_usd={month.limit_usd:g} suffices",
                    *speaking,
                ),
            )
        if planned_usd > month.left_usd:
            return Decision(False, (_over(planned_usd, month), *speaking))
    return Decision(True, tuple(speaking))


def reasons_to_train(examination: Examination, settings: Retrain) -> list[str]:
    """Reasons for training in the data, each with its numbers."""
    reasons = []
    if examination.changed_rows >= settings.min_new_rows:
        rated = f", {examination.new_ratings} of them ratings" if examination.new_ratings else ""
        reasons.append(
            f"{examination.changed_rows} rows were added or changed since the champion's data{rated} "
            f"({settings.min_new_rows} are a reason)"
        )
    drift = examination.length_drift
    if drift is not None and drift.distance > max(settings.max_length_drift, drift.critical):
        reasons.append(
            f"the prompts' lengths have drifted: {drift.mean_new:.1f} tokens on average, "
            f"{drift.mean_before:.1f} before; distance {drift.distance:.2f}, {settings.max_length_drift:g} is allowed"
        )
    words = examination.new_words
    if words is not None and words.low > settings.max_new_words:
        reasons.append(
            f"{percent(words.value)} of the words in new prompts were never seen, "
            f"{percent(settings.max_new_words)} are allowed"
        )
    accuracy, before = examination.accuracy, examination.accuracy_before
    if accuracy is not None and before is not None and accuracy.high < before - settings.max_accuracy_drop:
        reasons.append(
            f"the champion's reward model agrees with {percent(accuracy.value)} of {accuracy.of} new pairs, "
            f"{percent(before)} of its own held-out ones: more than {percent(settings.max_accuracy_drop)} less"
        )
    return reasons


def not_enough(examination: Examination, settings: Retrain) -> str:
    """Why there is no reason to train."""
    if not examination.changed_rows:
        return "nothing is new since the champion's data"
    return (
        f"{examination.changed_rows} rows were added or changed since the champion's data, "
        f"retrain.min_new_rows={settings.min_new_rows} are a reason "
        "to train; neither drift nor the reward model's accuracy on them is"
    )


def _over(planned_usd: float, month: Month) -> str:
    return (
        f"{usd(planned_usd)} are planned and {usd(max(0.0, month.left_usd or 0.0))} of "
        f"retrain.monthly_usd={month.limit_usd:g} are left in {month.name} ({usd(month.spent_usd)} are spent): "
        "raise it in params.yaml, or wait for the next month"
    )
