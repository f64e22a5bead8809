"""A retrain cycle as markdown, for the Prefect UI and for runs/retrain/<cycle>/cycle.md."""

from typing import NamedTuple

from config.workspace.champions import Champion
from config.workspace.retraining import Contest, Examination
from reporting.numbers import ABSENT, percent, usd
from tasks.champions.promotion_gate import Check, Verdict
from tasks.retraining.decision import Decision

MARKS = {True: "passes", False: "**fails**", None: "not checked"}


class Page(NamedTuple):
    """What is known at the end of a cycle; what it did not come to is None."""

    outcome: str
    said: str
    champion: Champion | None
    examination: Examination | None
    decision: Decision | None
    run_id: str | None
    contest: Contest | None
    verdict: Verdict | None
    usd: float


def markdown(page: Page) -> str:
    """Outcome, decision with its reasons, contest and gate, cost."""
    parts = [f"# Retrain: {page.outcome}", page.said]
    if page.champion is not None:
        parts.append(f"Champion at the start: `{page.champion.run_id}`.")
    if page.examination is not None:
        parts.append("## The data\n\n" + _data(page.examination))
    if page.decision is not None:
        reasons = "\n".join(f"- {reason}" for reason in page.decision.reasons)
        parts.append(
            f"## Decision: {'train' if page.decision.train else 'do not train'}\n\n{reasons}"
        )
    if page.contest is not None and page.verdict is not None:
        parts.append(
            f"## New model `{page.run_id}` against the champion\n\n"
            + _contest(page.contest)
            + "\n\n"
            + _checks(page.verdict.checks)
        )
    parts.append("## Cost\n\n" + _cost(page))
    return "\n\n".join(parts) + "\n"


def _data(found: Examination) -> str:
    rows = [
        f"| {name} | {found.added.get(name, 0)} | {found.removed.get(name, 0)} |"
        for name in sorted({*found.added, *found.removed})
    ]
    lines = [f"{found.refused} rows are in quarantine."]
    if found.length_drift is not None:
        drift = found.length_drift
        lines.append(
            f"Prompt lengths: {drift.mean_new:.1f} tokens in new rows, {drift.mean_before:.1f} "
            f"before; distance {drift.distance:.2f}, by chance "
            f"up to {drift.critical:.2f}."
        )
    if found.new_words is not None:
        lines.append(f"Words never seen in prompts: {percent(found.new_words.value)}.")
    if found.accuracy is not None:
        share, before = found.accuracy, percent(found.accuracy_before)
        lines.append(
            f"The champion's reward model agrees with {percent(share.value)} ({percent(share.low)} "
            f"to {percent(share.high)}) of {share.of} new "
            f"pairs; with {before} of those held out before."
        )
    return (
        "| rows | added | removed |\n|---|---:|---:|\n"
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(f"- {line}" for line in lines)
    )


def _contest(found: Contest) -> str:
    gold = (
        f"{found.gold.mean:+.3f} ({found.gold.low:+.3f} to {found.gold.high:+.3f})"
        if found.gold
        else "not known"
    )
    by_champion, own = found.champion_reward, found.challenger_reward
    left = (
        f", {found.left_out} more were left out because one of the models was trained on them"
        if found.left_out
        else ""
    )
    return (
        f"{found.prompts} held-out prompts{left}; judge: {found.judge}.\n\n"
        "| difference to the champion | mean (interval) |\n|---|---|\n"
        f"| gold score | {gold} |\n"
        f"| score of the champion's reward model | {by_champion.mean:+.3f} ({by_champion.low:+.3f} "
        f"to {by_champion.high:+.3f}) |\n"
        f"| score of its own reward model | {own.mean:+.3f} ({own.low:+.3f} to {own.high:+.3f}) |"
    )


def _checks(checks: tuple[Check, ...]) -> str:
    rows = "\n".join(
        f"| {check.name} | {MARKS[check.passed]} | {check.reason} |" for check in checks
    )
    return f"| condition | | |\n|---|---|---|\n{rows}"


def _cost(page: Page) -> str:
    per_point = page.verdict.usd_per_point if page.verdict else None
    each = usd(per_point) if per_point is not None else ABSENT
    return f"{usd(page.usd)} for the cycle; {each} for each percentage point of win rate above 50%."
