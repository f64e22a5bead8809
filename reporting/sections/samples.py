"""Replies of the three models to the same prompts, side by side."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from reporting.inputs import Findings, finite
from reporting.markup import element
from reporting.numbers import decimal
from reporting.parts import missing, section
from reporting.sections.evaluation import NAMES

LONGEST = 2000
"""Characters of a reply that are shown."""


def samples_section(findings: Findings) -> Markup:
    """The first `evaluate.samples` held-out prompts; nothing was selected."""
    rows = findings.samples
    if not rows:
        return section(
            "samples",
            "Sample replies",
            None,
            missing("No sample replies were written for this run."),
        )
    lead = (
        f"The first {len(rows)} held-out prompts, not selected. Scores under each reply are of "
        "that reply alone."
    )
    return section("samples", "Sample replies", lead, *(_sample(row) for row in rows))


def _sample(row: Mapping[str, Any]) -> Markup:
    replies = [_reply(row, model) for model in NAMES if row.get(model) is not None]
    return element(
        "article",
        *_prompt(row),
        element("div", *replies, class_="replies"),
        class_="card",
    )


def _prompt(row: Mapping[str, Any]) -> list[Markup]:
    """The prompt; of a conversation every turn with its speaker."""
    turns = row.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return [element("p", shown_text(row.get("prompt", "")), class_="prompt", dir="auto")]
    return [
        element(
            "p",
            element("b", str(turn.get("role", "?")).capitalize(), class_="speaker"),
            shown_text(turn.get("content", "")),
            class_="prompt turn" if place == len(turns) - 1 else "earlier turn",
            dir="auto",
        )
        for place, turn in enumerate(turns)
    ]


def _reply(row: Mapping[str, Any], model: str) -> Markup:
    scores = [
        f"{kind} {decimal(value)}"
        for kind in ("gold", "reward")
        if (value := finite(row.get(f"{kind}_{model}"))) is not None
    ]
    body = shown_text(row[model])
    return element(
        "div",
        element("h4", NAMES[model]),
        element("p", body, class_="reply", dir="auto")
        if body
        else element("p", "(empty reply)", class_="reply note"),
        element("p", " · ".join(scores), class_="scores") if scores else None,
        class_=f"said {model}",
    )


def shown_text(content: Any) -> str:
    """A reply, or a conversation with its speakers, cut where it is very long."""
    if isinstance(content, list):
        content = "\n".join(
            f"{turn.get('role', '?')}: {turn.get('content', '')}"
            if isinstance(turn, dict)
            else str(turn)
            for turn in content
        )
    shown = str(content).strip()
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:LONGEST]}… ({len(shown) - LONGEST:,} more characters)"
