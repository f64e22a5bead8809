"""A retrain cycle as markdown, for the Prefect UI and for runs/retrain/<cycle>/cycle.md."""

from collections.abc import Sequence

from config.workspace.feedback import VersionSummary
from config.workspace.retraining import Contest, Examination
from labelling.anytime import share_at_any_time
from reporting.numbers import ABSENT, percent, usd
from tasks.champions.promotion_gate import Check, Verdict
from tasks.retraining.decision import Decision

MARKS = {True: "passes", False: "**fails**", None: "not checked"}


def markdown(outcome: str, said: str, sections: Sequence[str], spent_usd: float) -> str:
    """Outcome, the sections of the steps that were taken, cost."""
    cost = f"## Cost\n\n{usd(spent_usd)} for the cycle."
    return "\n\n".join([f"# Retrain: {outcome}", said, *sections, cost]) + "\n"


def decision_section(decision: Decision) -> str:
    """Whether to train, and why."""
    reasons = "\n".join(f"- {reason}" for reason in decision.reasons)
    return f"## Decision: {'train' if decision.train else 'do not train'}\n\n{reasons}"


def contest_section(run_id: str, contest: Contest, verdict: Verdict) -> str:
    """The new model beside the champion, and the conditions of the gate."""
    point = verdict.usd_per_point
    cost = usd(point) if point is not None else ABSENT
    return (
        f"## New model `{run_id}` against the champion\n\n{_contest(contest)}\n\n"
        f"{_checks(verdict.checks)}\n\n{cost} for each percentage point of win rate above 50%."
    )


def data_section(examination: Examination) -> str:
    rows = [
        f"| {name} | {examination.added.get(name, 0)} | {examination.removed.get(name, 0)} |"
        for name in sorted({*examination.added, *examination.removed})
    ]
    lines = [f"{examination.refused} rows are in quarantine."]
    if examination.length_drift is not None:
        drift = examination.length_drift
        lines.append(
            f"Prompt lengths: {drift.mean_new:.1f} tokens in new rows, {drift.mean_before:.1f} before; "
            f"distance {drift.distance:.2f}, by chance up to {drift.critical:.2f}."
        )
    if examination.new_words is not None:
        lines.append(f"Words never seen in prompts: {percent(examination.new_words.value)}.")
    if examination.accuracy is not None:
        share, before = examination.accuracy, percent(examination.accuracy_before)
        lines.append(
            f"The champion's reward model agrees with {percent(share.value)} ({percent(share.low)} to "
            f"{percent(share.high)}) of {share.of} new pairs; with {before} of those held out before."
        )
    return (
        "| rows | added | removed |\n|---|---:|---:|\n"
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(f"- {line}" for line in lines)
    )


def feedback_section(versions: Sequence[VersionSummary]) -> str:
    """What users said of each model's replies, as `rlhf feedback` shows it."""
    rows = []
    for version in versions:
        share = share_at_any_time(version.up, version.rated)
        interval = (
            f"{percent(share.value)} ({percent(share.low)} to {percent(share.high)})" if version.rated else ABSENT
        )
        rows.append(f"| `{version.run_id}` | {version.replies} | {version.rated} | {interval} |")
    return "## Users\n\n| model | replies | rated | up, at any time |\n|---|---:|---:|---|\n" + "\n".join(rows)


def _contest(contest: Contest) -> str:
    gold = (
        f"{contest.gold.mean:+.3f} ({contest.gold.low:+.3f} to {contest.gold.high:+.3f})"
        if contest.gold
        else "not known"
    )
    by_champion, by_challenger = contest.champion_reward, contest.challenger_reward
    left_out = (
        f", {contest.left_out} more were left out because one of the models was trained on them"
        if contest.left_out
        else ""
    )
    return (
        f"{contest.prompts} held-out prompts{left_out}; judge: {contest.judge}.\n\n| difference to the champion | "
        f"mean (interval) |\n|---|---|\n| gold score | {gold} |\n| score of the champion's reward model | "
        f"{by_champion.mean:+.3f} ({by_champion.low:+.3f} to {by_champion.high:+.3f}) "
        f"|\n| score of its own reward model | {by_challenger.mean:+.3f} ({by_challenger.low:+.3f} to "
        f"{by_challenger.high:+.3f}) |"
    )


def _checks(checks: tuple[Check, ...]) -> str:
    rows = "\n".join(f"| {check.name} | {MARKS[check.passed]} | {check.reason} |" for check in checks)
    return f"| condition | | |\n|---|---|---|\n{rows}"
