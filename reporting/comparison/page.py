"""A comparison as one HTML file without scripts or requests."""

from collections.abc import Iterator

from markupsafe import Markup

from reporting.charts import Dot, Series, dots_chart, legend, line_chart
from reporting.comparison.runs import METRICS, Comparison, VariantResult
from reporting.comparison.statistics import SAME
from reporting.comparison.words import difference, estimate, growth, interval, letter, param, remarks, sentence
from reporting.inputs import finite
from reporting.numbers import decimal, duration, usd
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


def comparison_page(comparison: Comparison, title: str, command: str) -> str:
    """The comparison as one HTML text; `command` prints the same as JSON with --json."""
    content = [_variants(comparison), _growth(comparison), _metrics(comparison), _costs(comparison)]
    content += [_params(comparison), _samples(comparison)]
    head = masthead(title, sentence=sentence(comparison), notes=comparison.notes)
    return document(title, head, [part for part in content if part], [f"{command} --json"])


def _variants(comparison: Comparison) -> Markup:
    rows = []
    for i, variant in enumerate(comparison.variants):
        name = together(tagged("b", letter(i), _tone(i)), " ", variant.name)
        if variant.verdict == "not run":
            rows.append([name, "", "", "", "", "", "", [badge("not run", "bad"), variant.reason]])
            continue
        rows.append(
            [
                name,
                usd(variant.planned_usd),
                usd(variant.measured_usd),
                duration(variant.seconds),
                decimal(variant.quality),
                interval(variant.difference),
                str(len(variant.runs)),
                badge(variant.verdict, _verdict_tone(variant)),
            ]
        )
    judge = comparison.judge.capitalize()
    header = ["Variant", "Planned", "Measured", "Time", judge, "Difference", "Runs", "Verdict"]
    lead = (
        f"{letter(0)} is the base. A variant is as good if the 95% interval of its difference lies "
        f"above -{comparison.margin:g}."
    )
    picture = _picture(comparison)
    body = table(header, rows, numbers=range(1, 7))
    return section("variants", "Cost and quality", lead, picture, body, bullets(remarks(comparison)))


def _verdict_tone(variant: VariantResult) -> str:
    if variant.verdict in ("base", "as good"):
        return "quiet"
    return {"cheaper and as good": "good", "worse": "bad"}.get(variant.verdict, "open")


def _picture(comparison: Comparison) -> Markup | None:
    base = comparison.variants[0]
    dots = []
    for variant in comparison.variants:
        if variant.measured_usd is None or variant.quality is None:
            continue
        low, high = variant.quality, variant.quality
        if variant.difference is not None and variant.difference.low is not None:
            level = base.quality or 0.0
            low, high = level + variant.difference.low, level + (variant.difference.high or 0.0)
        title = (
            f"{variant.name}: measured {usd(variant.measured_usd)}, planned "
            f"{usd(variant.planned_usd)}; {comparison.judge} {decimal(variant.quality)}"
        )
        tone = "second" if variant is base else "accent" if variant.verdict in SAME else "quiet"
        dots.append(
            Dot(title, variant.measured_usd, variant.quality, low, high, tone,
                planned=variant.planned_usd,
                caption=variant.name if variant.name in (base.name, comparison.cheapest) else "")
        )  # fmt: skip
    if len(dots) < 2:
        return None
    shown = (("accent", "as good"), ("second", "base"), ("quiet", "not shown to be as good"))
    return card(
        "Cost against quality",
        dots_chart(dots, "Cost against quality, one dot per variant", "US dollars", comparison.judge, height=340),
        legend([Series(name, [], tone) for tone, name in shown]),
        note="Full dots are measured and joined with what was planned. Whiskers: the interval of "
        "the difference to the base.",
    )


def _growth(comparison: Comparison) -> Markup | None:
    cards = []
    for fit in comparison.growth:
        curves = [
            Series("measured", sorted(zip(fit.sizes, fit.measured_usd, strict=True))),
            Series("planned", sorted(zip(fit.sizes, fit.planned_usd, strict=True)), "second"),
        ]
        chart = line_chart(curves, f"US dollars by {fit.factor}", fit.factor, steps=False)
        cards.append(card(fit.factor, legend(curves), chart, note=growth(fit)))
    lead = "US dollars of the steps, without starts, checkpoints and evaluation."
    return section("growth", "How cost grows", lead, grid(*cards)) if cards else None


def _metrics(comparison: Comparison) -> Markup:
    names = _names(comparison)
    rows = [
        [
            metric.title,
            *(estimate(variant.metrics.get(metric.name), metric) for variant in comparison.variants),
            *(difference(variant.differences.get(metric.name), metric) for variant in comparison.variants[1:]),
        ]
        for metric in METRICS
        if any(metric.name in variant.metrics for variant in comparison.variants)
    ]
    lead = "A difference is clear if its interval leaves out zero."
    header = ["On held-out data", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    body = table(header, rows) if rows else missing("None of the runs has results.")
    return section("metrics", "What it bought", lead, body)


def _costs(comparison: Comparison) -> Markup:
    stages = dict.fromkeys(stage for variant in comparison.variants for stage in variant.stages)
    rows = [[stage, *(usd(variant.stages.get(stage)) for variant in comparison.variants)] for stage in stages]
    total = ["total", *(usd(sum(variant.stages.values())) for variant in comparison.variants)]
    lead = (
        "What making the outputs of each stage cost, done once: reuse and waste are left out, so "
        "that equal work costs the same."
    )
    return section("costs", "Cost", lead, table(["Stage", *_names(comparison)], rows, total))


def _params(comparison: Comparison) -> Markup:
    title = "Parameters that differ"
    if not comparison.params:
        return section("params", title, None, missing("The runs have the same parameters."))
    rows = [[tagged("code", key), *(param(value) for value in values)] for key, values in comparison.params.items()]
    return section("params", title, None, table(["Parameter", *_names(comparison)], rows))


def _samples(comparison: Comparison) -> Markup:
    title = "Replies to the same prompts"
    if not comparison.samples:
        return section("samples", title, None, missing("The runs have no sample replies to the same prompts."))
    lead = "Replies of the aligned models, not selected. Rewards are by the run's own reward model."
    return section("samples", title, lead, *(_sample(shown) for shown in comparison.samples))


def _sample(shown: dict[str, object]) -> Markup:
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


def _names(comparison: Comparison) -> list[str]:
    return [letter(i) for i in range(len(comparison.variants))]


def _tone(i: int) -> str:
    return TONES[i % len(TONES)]
