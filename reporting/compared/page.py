"""Runs side by side as one HTML file without scripts or requests."""

from collections.abc import Iterator

from markupsafe import Markup

from costs.ledger.cost_change import CostChange
from reporting import charts
from reporting.compared.side_by_side import MetricDifference, SampleReplies, SideBySide
from reporting.compared.words import (
    difference,
    estimate,
    hacking,
    judged,
    letter,
    param,
    rows_changed,
    signed_usd,
    why,
)
from reporting.inputs import finite
from reporting.numbers import ABSENT, count, decimal, duration, usd
from reporting.parts import (
    badge,
    card,
    document,
    grid,
    group,
    masthead,
    missing,
    navigation,
    remark,
    sample,
    section,
    table,
    tagged,
    together,
)
from reporting.sections.data import DATASETS
from reporting.sections.samples import shown_text
from reporting.verdict import usd_per_win_rate_point, verdict

ANCHORS = (
    ("metrics", "Results"),
    ("costs", "Time and cost"),
    ("samples", "Replies"),
    ("params", "Parameters"),
    ("data", "Data"),
)
PICTURES = (("win_rate_gold", 0.5), ("win_rate_reward", 0.5), ("accuracy", None))
"""Metrics that are drawn, with the value that means no difference."""
TONES = ("c2", "c4", "c3", "c5", "c1")
"""Colours of the runs, in order."""


def side_by_side_page(found: SideBySide) -> str:
    """The comparison as one HTML text."""
    runs = [side.findings for side in found.sides]
    head = masthead(
        runs[0].params.tracking.registered_model, "runs side by side", notes=found.notes
    )
    content = [
        _runs(found),
        navigation(ANCHORS),
        _metrics(found),
        _costs(found),
        _samples(found),
        _params(found),
        _data(found),
    ]
    names = [side.run_id for side in found.sides]
    command = f"rlhf compare {' '.join(names)} --json"
    title = f"{' and '.join(names)} side by side"
    return document(title, head, content, [command], "The same as JSON: ")


def _runs(found: SideBySide) -> Markup:
    rows = []
    for i, side in enumerate(found.sides):
        book, judgement = side.findings.ledger, verdict(side.findings)
        name = together(tagged("b", letter(i), _tone(i)), " ", book.run_id)
        state = None if book.state == "completed" else remark(book.state)
        numbers = (
            book.total_usd,
            book.waste_usd,
            book.saved_usd,
            usd_per_win_rate_point(side.findings),
        )
        rows.append(
            [
                name,
                [badge(judgement.title, judgement.tone), state],
                duration(book.total_seconds),
                *map(usd, numbers),
            ]
        )
    header = ["Run", "Verdict", "Time", "Cost", "Wasted", "Saved", "Per win point"]
    return table(header, rows, numbers=range(2, 7))


def _metrics(found: SideBySide) -> Markup:
    lead = (
        f"{letter(0)} is the baseline. A difference is significant if its interval leaves out zero."
    )
    others = range(1, len(found.sides))
    names = [letter(i) for i in range(len(found.sides))]
    differences = [f"{letter(i)} − {letter(0)}" for i in others]
    rows = [
        [
            row.metric.title,
            *(estimate(value, row.metric) for value in row.estimates),
            *(_difference_cell(row, i - 1) for i in others),
        ]
        for row in found.metrics
    ]
    if (hacked := hacking(found)) is not None:
        rows.append(["Reward hacking", *hacked, *("" for _ in others)])
    pictures = [
        picture for name, mark in PICTURES if (picture := _picture(found, name, mark)) is not None
    ]
    body = (
        table(["On held-out data", *names, *differences], rows)
        if rows
        else missing("None of the runs has results.")
    )
    return section("metrics", "What it bought", lead, grid(*pictures) if pictures else None, body)


def _difference_cell(row: MetricDifference, i: int) -> list[object]:
    judgement = judged(row.differences[i])
    shown = difference(row.differences[i], row.metric)
    return [shown, remark(judgement) if judgement else None]


def _picture(found: SideBySide, name: str, mark: float | None) -> Markup | None:
    row = next((row for row in found.metrics if row.metric.name == name), None)
    if row is None:
        return None
    dots = [
        charts.Estimate(
            letter(i), value.value, row.metric.shown(value.value), _tone(i), value.low, value.high
        )
        for i, value in enumerate(row.estimates)
        if value is not None
    ]
    description = ", ".join(f"{dot.name} {dot.shown}" for dot in dots)
    return card(
        row.metric.title,
        charts.estimates(
            dots,
            f"{row.metric.title}: {description}",
            0.0,
            1.0,
            mark,
            "50%, no difference" if mark else "",
        ),
    )


def _costs(found: SideBySide) -> Markup:
    lead = (
        "What making the outputs of each stage cost, done once: reuse and waste are left out, so "
        "that equal work costs the same. A difference "
        "is shared out between tokens, rate (tokens per second and device), time where no tokens "
        "are counted, and price."
    )
    return section(
        "costs", "Time and cost", lead, *(_pair(found, i) for i in range(1, len(found.sides)))
    )


def _pair(found: SideBySide, i: int) -> Markup:
    *stages, total = found.costs[i - 1]
    parts = [part for change in stages for part in (change, *change.phases)]
    header = [f"{of}, {letter(0)} → {letter(i)}" for of in ("Time", "Tokens/s", "Cost")]
    body = table(
        ["Stage, phase", *header, "Change", "Why"],
        [_cost_row(part, i) for part in parts],
        _cost_row(total, i),
        numbers=range(1, 5),
        row_names=[(part.stage or "total", part.phase) for part in (*parts, total)],
    )
    title = f"{letter(0)} and {letter(i)}" if len(found.sides) > 2 else None
    return group(title, body)


def _cost_row(change: CostChange, i: int) -> list[object]:
    sides = (change.before, change.after)
    # a stage's tokens are of several kinds
    rates = [side.tokens_per_second if side and change.phase else None for side in sides]
    return [
        f"\u2003{change.phase}" if change.phase else tagged("b", change.stage or "total"),
        " → ".join(ABSENT if side is None else duration(side.device_seconds) for side in sides),
        " → ".join(ABSENT if rate is None else decimal(rate) for rate in rates)
        if any(rates)
        else "",
        " → ".join(ABSENT if side is None else usd(side.usd) for side in sides),
        signed_usd(change.usd),
        remark(why(change, letter(0), letter(i))),
    ]


def _samples(found: SideBySide) -> Markup:
    title = "Replies to the same prompts"
    if not found.samples:
        return section(
            "samples", title, None, missing("The runs have no sample replies to the same prompts.")
        )
    lead = (
        "Replies of the aligned model of each run, not selected. The reward is the run's own "
        "reward model's."
    )
    return section("samples", title, lead, *(_sample(each) for each in found.samples))


def _sample(shown: SampleReplies) -> Markup:
    replies = [
        {
            "tone": _tone(i),
            "name": letter(i),
            "body": shown_text(row.get("aligned", "")) if row else "",
            "absent": "(empty reply)" if row else "(not asked)",
            "scores": list(_scores(row)) if row else [],
        }
        for i, row in enumerate(shown.rows)
    ]
    return sample([{"speaker": None, "content": shown_text(shown.prompt)}], replies)


def _scores(row: object) -> Iterator[str]:
    assert isinstance(row, dict)
    for kind in ("gold", "reward"):
        if (value := finite(row.get(f"{kind}_aligned"))) is not None:
            yield f"{kind} {decimal(value)}"


def _params(found: SideBySide) -> Markup:
    title = "Parameters that differ"
    if not found.params:
        return section("params", title, None, missing("The runs have the same parameters."))
    rows = [
        [tagged("code", row.key), *(param(value) for value in row.values)] for row in found.params
    ]
    return section("params", title, None, table(["Parameter", *_names(found)], rows))


def _data(found: SideBySide) -> Markup:
    title = "Data"
    if not found.data:
        return section("data", title, None, missing("None of the runs has prepared data."))
    others = [f"{letter(i)} against {letter(0)}" for i in range(1, len(found.sides))]
    rows = [
        [
            DATASETS[row.dataset],
            row.split,
            *(count(rows) for rows in row.rows),
            *(rows_changed(change) for change in row.changes),
        ]
        for row in found.data
    ]
    lead = "Rows added (+) and removed (−), by content: an edited row counts as both."
    return section(
        "data",
        title,
        lead,
        table(["Dataset", "Split", *_names(found), *others], rows, numbers=range(2, 99)),
    )


def _names(found: SideBySide) -> list[str]:
    return [letter(i) for i in range(len(found.sides))]


def _tone(i: int) -> str:
    return TONES[i % len(TONES)]
