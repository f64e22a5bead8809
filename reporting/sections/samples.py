"""Replies of the three models to the same prompts, side by side."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from reporting.inputs import Findings, finite
from reporting.numbers import decimal
from reporting.parts import missing, sample, section
from reporting.sections.evaluation import NAMES

CHANGED = 3
LONGEST = 2000
"""Characters of a reply that are shown."""


def samples_section(findings: Findings) -> Markup:
    """The first `evaluate.samples` held-out prompts; those come first in which alignment is seen best."""
    rows = findings.samples
    if not rows:
        return section("samples", "Sample replies", None, missing("No sample replies were written for this run."))
    changed = sorted(rows, key=_gain, reverse=True)[:CHANGED]
    others = [row for row in rows if not any(row is other for other in changed)]
    lead = (
        f"Of the first {len(rows)} held-out prompts, the {len(changed)} whose score alignment raised most, then the "
        "others as they come. Scores under each reply are of that reply alone."
    )
    return section("samples", "Sample replies", lead, *(_sample(row) for row in [*changed, *others]))


def _gain(row: Mapping[str, Any]) -> float:
    """What alignment brought: gold score where it is known, else that of the reward."""
    for kind in ("gold", "reward"):
        before, after = (finite(row.get(f"{kind}_{model}")) for model in ("sft", "aligned"))
        if before is not None and after is not None:
            return after - before
    return 0.0


def _sample(row: Mapping[str, Any]) -> Markup:
    return sample(_turns(row), [_reply(row, model) for model in NAMES if row.get(model) is not None])


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt; of a conversation every turn with its speaker."""
    turns = row.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return [{"speaker": None, "content": shown_text(row.get("prompt", ""))}]
    return [
        {"speaker": str(turn.get("role", "?")).capitalize(), "content": shown_text(turn.get("content", ""))}
        for turn in turns
    ]


def _reply(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    scores = [
        f"{kind} {decimal(value)}"
        for kind in ("gold", "reward")
        if (value := finite(row.get(f"{kind}_{model}"))) is not None
    ]
    body, absent = shown_text(row[model]), "(empty reply)"
    return {"tone": model, "name": NAMES[model], "body": body, "absent": absent, "scores": scores}


def shown_text(content: Any) -> str:
    """A reply, or a conversation with its speakers, cut where it is very long."""
    if isinstance(content, list):
        content = "\n".join(
            f"{turn.get('role', '?')}: {turn.get('content', '')}" if isinstance(turn, dict) else str(turn)
            for turn in content
        )
    shown = str(content).strip()
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:LONGEST]}… ({len(shown) - LONGEST:,} more characters)"
