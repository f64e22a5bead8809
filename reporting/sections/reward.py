"""How reliable the reward model is: accuracy beside the trivial and the best possible, and calibration."""

from markupsafe import Markup

from config.sections.offline import RewardFunction
from reporting.charts import Estimate, estimates, reliability_chart
from reporting.inputs import Findings
from reporting.numbers import ABSENT, count, decimal, percent
from reporting.parts import card, grid, missing, section, stack, table

COMPARED = (
    ("accuracy", "", "aligned"),
    ("bayes_accuracy", "Best possible", "base"),
    ("baseline_bow", "Bag of words", "base"),
    ("baseline_longer_wins", "Longer reply wins", "base"),
)


def reward_section(findings: Findings) -> Markup:
    """Accuracy and calibration on held-out pairs."""
    name = findings.params.reward_name
    title = f"How reliable is the {name}?"
    if not findings.metrics["reward"]:
        return section("reward", title, None, missing("The stage reward has no results in this run."))
    pairs = findings.value("reward", "test_pairs")
    lead = f"On {count(pairs)} held-out pairs." if pairs else "On held-out pairs."
    settings = findings.params.reward
    if isinstance(settings, RewardFunction):
        tried = findings.value("reward", "tried")
        lead = f"{settings.path}, tried on {count(tried)} held-out replies."
        if findings.metrics["reward"].get("empty_as_good"):
            lead += " It scores empty replies as well as known ones: a model can learn to say nothing."
        return section("reward", title, lead, stack(_accuracy(findings), _numbers(findings)))
    return section(
        "reward",
        title,
        lead,
        grid(stack(_accuracy(findings), _numbers(findings)), _calibration(findings), kind="halves"),
    )


def _accuracy(findings: Findings) -> Markup:
    rows = []
    for name, shown, tone in COMPARED:
        value = findings.value("reward", name)
        if value is not None:
            low, high = (_end(findings, name, end) for end in ("low", "high"))
            named = shown or findings.params.reward_name.capitalize()
            rows.append(Estimate(named, value, percent(value), tone, low, high))
    if not rows:
        return card("Accuracy", missing("Not measured."))
    description = ", ".join(f"{row.name} {row.shown}" for row in rows)
    axis_low = min(0.5, *(row.value if row.low is None else row.low for row in rows))
    note = (
        "How often the reply that people preferred scores higher. Axis from "
        + f"{percent(axis_low, 0)} to 100%; a coin toss is 50%. "
    )
    limit = findings.value("reward", "bayes_accuracy")
    if limit is None:
        note += "How much is possible is not known for this data: the labels' own noise sets a limit below 100%."
    else:
        note += "Best possible: labels are drawn with noise, so even the true score is not always right."
    return card("Accuracy", estimates(rows, f"Accuracy: {description}", axis_low, 1.0), note=note)


def _numbers(findings: Findings) -> Markup | None:
    """The stage's other measurements."""
    facts = {
        "Calibration error (ECE)": decimal(findings.value("reward", "ece")),
        "Mean margin": decimal(findings.value("reward", "margin_mean")),
        "Score mean": decimal(findings.value("reward", "score_mean")),
        "Score deviation": decimal(findings.value("reward", "score_std")),
        "Training pairs": count(findings.value("reward", "train_pairs")),
        "Steps": count(findings.value("reward", "steps")),
        "Pairs too long": count(findings.value("reward", "pairs_too_long")),
    }
    shown_facts = {name: shown for name, shown in facts.items() if shown != ABSENT}
    return (
        card("In numbers", table(["On held-out and training pairs", "Value"], list(shown_facts.items())))
        if shown_facts
        else None
    )


def _end(findings: Findings, name: str, end: str) -> float | None:
    """An end of an interval; the baselines' own are in the metrics of the data stage."""
    value = findings.value("reward", f"{name}_{end}")
    return value if value is not None else findings.value("data", f"{name}_{end}")


def _calibration(findings: Findings) -> Markup:
    if not findings.calibration:
        return card("Calibration", missing("No calibration was written for this run."))
    ece = findings.value("reward", "ece")
    description = "; ".join(f"confidence {decimal(c, 2)}, right {decimal(a, 2)}" for c, a, _ in findings.calibration)
    note = "On the dashed line confidence equals accuracy; below it the model is overconfident. Bars count the pairs. "
    if ece is not None:
        note += f"Expected calibration error {decimal(ece)}: the mean distance from that line."
    return card(
        "Calibration", reliability_chart(findings.calibration, f"Reliability diagram: {description}"), note=note
    )
