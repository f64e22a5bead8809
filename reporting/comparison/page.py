"""A comparison as one HTML file without scripts or requests."""

from collections.abc import Iterator

from markupsafe import Markup

from reporting.charts import Dot, Series, dots_chart, legend, line_chart
from reporting.comparison.runs import METRICS, Comparison, VariantResult
from reporting.comparison.statistics import SAME
from reporting.comparison.words import (
    difference,
    estimate,
    growth,
    interval,
    letter,
    param,
    remarks,
    sentence,
)
from reporting.inputs import finite
from reporting.numbers import ABSENT, decimal, duration, usd
from reporting.parts import (
    badge,
    bullets,
    card,
    document,
    grid,
    masthead,
    missing,
    sample,
    section,
    table,
    tagged,
    together,
)
from reporting.sections.samples import shown_text

TONES = ("c2", "c4", "c3", "c5", "c1")
"""Colours of the runs, in order."""


def comparison_page(found: Comparison, title: str, command: str) -> str:
    """The comparison as one HTML text; `command` prints the same as JSON with --json."""
    content = [_variants(found), _growth(found), _metrics(found), _costs(found)]
    content += [_params(found), _samples(found)]
    head = masthead(title, sentence=sentence(found), notes=found.notes)
    return document(title, head, [part for part in content if part], [f"{command} --json"])


def _variants(found: Comparison) -> Markup:
    rows = []
    for i, each in enumerate(found.variants):
        name = together(tagged("b", letter(i), _tone(i)), " ", each.name)
        if each.verdict == "not run":
            rows.append([name, "", "", "", "", "", "", [badge("not run", "bad"), each.reason]])
            continue
        rows.append(
            [
                name,
                usd(each.planned_usd),
                usd(each.measured_usd),
                duration(each.seconds),
                decimal(each.quality),
                interval(each.difference),
                str(len(each.runs)),
                badge(each.verdict, _verdict_tone(each)),
            ]
        )
    judge = found.judge.capitalize()
    header = ["Variant", "Planned", "Measured", "Time", judge, "Difference", "Runs", "Verdict"]
    lead = (
        f"{letter(0)} is the base. A variant is as good if the 95% interval of its difference lies "
        f"above -{found.margin:g}."
    )
    picture = _picture(found)
    body = table(header, rows, numbers=range(1, 7))
    return section("variants", "Cost and quality", lead, picture, body, bullets(remarks(found)))


def _verdict_tone(each: VariantResult) -> str:
    if each.verdict in ("base", "as good"):
        return "quiet"
    return {"cheaper and as good": "good", "worse": "bad"}.get(each.verdict, "open")


def _picture(found: Comparison) -> Markup | None:
    base = found.variants[0]
    dots = []
    for each in found.variants:
        if each.measured_usd is None or each.quality is None:
            continue
        low, high = each.quality, each.quality
        if each.difference is not None and each.difference.low is not None:
            level = base.quality or 0.0
            low, high = level + each.difference.low, level + (each.difference.high or 0.0)
        title = (
            f"{each.name}: measured {usd(each.measured_usd)}, planned {usd(each.planned_usd)}; "
            f"{found.judge} {decimal(each.quality)}"
        )
        tone = "second" if each is base else "accent" if each.verdict in SAME else "quiet"
        dots.append(
            Dot(title, each.measured_usd, each.quality, low, high, tone,
                planned=each.planned_usd,
                caption=each.name if each is base or each.name == found.cheapest else "")
        )  # fmt: skip
    if len(dots) < 2:
        return None
    shown = (("accent", "as good"), ("second", "base"), ("quiet", "not shown to be as good"))
    return card(
        "Cost against quality",
        dots_chart(
            dots, "Cost against quality, one dot per variant", "US dollars", found.judge, height=340
        ),
        legend([Series(name, [], tone) for tone, name in shown]),
        note="Full dots are measured and joined with what was planned. Whiskers: the interval of "
        "the difference to the base.",
    )


def _growth(found: Comparison) -> Markup | None:
    cards = []
    for each in found.growth:
        curves = [
            Series("measured", sorted(zip(each.sizes, each.measured_usd, strict=True))),
            Series("planned", sorted(zip(each.sizes, each.planned_usd, strict=True)), "second"),
        ]
        drawn = line_chart(curves, f"US dollars by {each.factor}", each.factor, steps=False)
        cards.append(card(each.factor, legend(curves), drawn, note=growth(each)))
    lead = "US dollars of the steps, without starts, checkpoints and evaluation."
    return section("growth", "How cost grows", lead, grid(*cards)) if cards else None


def _metrics(found: Comparison) -> Markup:
    names = _names(found)
    rows = [
        [
            metric.title,
            *(estimate(each.metrics.get(metric.name), metric) for each in found.variants),
            *(difference(each.differences.get(metric.name), metric) for each in found.variants[1:]),
        ]
        for metric in METRICS
        if any(metric.name in each.metrics for each in found.variants)
    ]
    lead = "A difference is clear if its interval leaves out zero."
    header = ["On held-out data", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    body = table(header, rows) if rows else missing("None of the runs has results.")
    return section("metrics", "What it bought", lead, body)


def _costs(found: Comparison) -> Markup:
    stages = dict.fromkeys(stage for each in found.variants for stage in each.stages)
    rows = [[stage, *(_usd(each.stages.get(stage)) for each in found.variants)] for stage in stages]
    total = ["total", *(usd(sum(each.stages.values())) for each in found.variants)]
    lead = (
        "What making the outputs of each stage cost, done once: reuse and waste are left out, so "
        "that equal work costs the same."
    )
    return section("costs", "Cost", lead, table(["Stage", *_names(found)], rows, total))


def _usd(value: float | None) -> str:
    return ABSENT if value is None else usd(value)


def _params(found: Comparison) -> Markup:
    title = "Parameters that differ"
    if not found.params:
        return section("params", title, None, missing("The runs have the same parameters."))
    rows = [
        [tagged("code", key), *(param(value) for value in values)]
        for key, values in found.params.items()
    ]
    return section("params", title, None, table(["Parameter", *_names(found)], rows))


def _samples(found: Comparison) -> Markup:
    title = "Replies to the same prompts"
    if not found.samples:
        return section(
            "samples", title, None, missing("The runs have no sample replies to the same prompts.")
        )
    lead = "Replies of the aligned models, not selected. Rewards are by the run's own reward model."
    return section("samples", title, lead, *(_sample(found, each) for each in found.samples))


def _sample(found: Comparison, shown: dict[str, object]) -> Markup:
    rows = shown["replies"]
    assert isinstance(rows, list)
    replies = [
        {
            "tone": _tone(i),
            "name": letter(i),
            "body": shown_text(row.get("aligned", "")) if row else "",
            "absent": "(empty reply)" if row else "(not asked)",
            "scores": list(_scores(row)) if row else [],
        }
        for i, row in enumerate(rows)
    ]
    return sample([{"speaker": None, "content": shown_text(shown["prompt"])}], replies)


def _scores(row: dict[str, object]) -> Iterator[str]:
    for kind in ("gold", "reward"):
        if (value := finite(row.get(f"{kind}_aligned"))) is not None:
            yield f"{kind} {decimal(value)}"


def _names(found: Comparison) -> list[str]:
    return [letter(i) for i in range(len(found.variants))]


def _tone(i: int) -> str:
    return TONES[i % len(TONES)]
