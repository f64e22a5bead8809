"""Results of `rlhf levers` and `rlhf scale` on one HTML page: cost against quality, the frontier of
quality against KL, a row per variant, and how cost grows.
"""

from itertools import cycle
from pathlib import Path

from markupsafe import Markup

from config.atomic_file import write_atomically
from config.workspace.levers import Growth, Levers, Scale, VariantResult, read_levers, read_scale
from reporting.build import REPORT
from reporting.charts import Dot, Reference, Series, dots_chart, legend, line_chart
from reporting.numbers import ABSENT, decimal, duration, memory, percent, short, usd
from reporting.parts import (
    badge,
    bullets,
    card,
    document,
    grid,
    masthead,
    remark,
    section,
    table,
)
from reporting.templating import Child

PAGE = REPORT.with_name("levers.html")
BASELINE = "baseline"
TONES = ("accent", "second", "sft", "student", "quiet")
HEAD = (
    "variant", "$", "planned", "time", "memory", "FLOPs", "quality", "difference", "KL",
    "at target",
)  # fmt: skip


def write_levers_page(root: Path) -> Path:
    """Write report/levers.html from the kept results and return its path."""
    page = root / PAGE
    page.parent.mkdir(exist_ok=True)
    write_atomically(page, levers_page(read_levers(root), read_scale(root)))
    return page


def levers_page(levers: Levers | None, scale: Scale | None) -> str:
    """The page, from whichever of the two results exists."""
    sentence = levers_sentence(levers) if levers else "No levers have been compared yet."
    parts: list[Markup] = []
    if levers is not None:
        parts += [_pictures(levers), _variants(levers), _decisions(levers)]
    if scale is not None:
        parts.append(_growth(scale))
    commands = ["rlhf levers --json", "rlhf scale --json"]
    return document("Cost levers", masthead("Cost levers", sentence=sentence), parts, commands)


def levers_sentence(found: Levers) -> str:
    """The result in one sentence."""
    by_name = {each.name: each for each in found.variants}
    base, best = by_name[BASELINE], by_name.get(found.best or "")
    if best is None or best is base or not best.measured_usd or not base.measured_usd:
        return "No variant is cheaper than the baseline at the same quality."
    times = base.measured_usd / best.measured_usd
    return (
        f"{best.name}: same quality, {times:.1f} times cheaper ({usd(best.measured_usd)} instead "
        f"of {usd(base.measured_usd)})."
    )


def _pictures(found: Levers) -> Markup:
    done = [each for each in found.variants if each.state == "done" and each.measured_usd]
    dots = [
        Dot(
            _title(each), each.measured_usd or 0.0, each.quality or 0.0, each.quality_low or 0.0,
            each.quality_high or 0.0, _tone(each), planned=each.planned_usd or 0.0,
            caption=each.name if each.name in (BASELINE, found.best) else "",
        )
        for each in done
    ]  # fmt: skip
    judge = found.judge.replace("_", " ")
    frontier = [
        Series(name, [(point.kl, point.quality) for point in points], tone)
        for (name, points), tone in zip(found.frontier.items(), cycle(TONES), strict=False)
        if points
    ]
    cards = [
        card(
            "Cost against quality",
            dots_chart(
                dots, "Cost against quality, one dot per variant", "US dollars to align", judge,
                [Reference("target", found.target)], height=340,
            ),
            _keys(),
            note="Full dots are measured and joined with what was planned. Whiskers: confidence "
            "intervals. Whether a variant is as good is decided by paired differences, which are "
            "narrower.",
        )
    ]  # fmt: skip
    if frontier:
        cards.append(
            card(
                "Quality against KL",
                legend(frontier),
                line_chart(
                    frontier, "Quality against KL", "nats per reply from the SFT model",
                    height=310, steps=False,
                ),
                note="Along training for methods that sample, by their own training prompts; the "
                "last point is on held-out prompts. best-of-n by n, its KL an upper bound.",
            )
        )  # fmt: skip
    lead = (
        f"Each variant aligns the same SFT model. As good: at most {found.margin:g} below the "
        f"baseline ({percent(found.confidence, 0)} paired interval over "
        f"{_seeds(found)}); the target was written down before the variants ran."
    )
    return section("cost", "What each lever saves", lead, grid(*cards, kind="halves"))


def _keys() -> Markup:
    shown = (("accent", "as good"), ("second", "baseline"), ("quiet", "not shown to be as good"))
    return legend([Series(name, [], tone) for tone, name in shown])


def _title(each: VariantResult) -> str:
    return (
        f"{each.name}: measured {decimal(each.measured_usd)}, planned "
        f"{decimal(each.planned_usd or 0.0)}; quality {decimal(each.quality)} "
        f"({decimal(each.quality_low)} to {decimal(each.quality_high)})"
    )


def _tone(each: VariantResult) -> str:
    if each.name == BASELINE:
        return "second"
    return "accent" if each.same_quality else "quiet"


def _seeds(found: Levers) -> str:
    return "one seed" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"


def _variants(found: Levers) -> Markup:
    base = next(each for each in found.variants if each.name == BASELINE)
    ordered = sorted(
        found.variants, key=lambda each: (each.state != "done", each.measured_usd or 1e9)
    )
    rows = [_row(each, base) for each in ordered]
    note = (
        "Dollars are of the alignment (and of a student); shared data, SFT and reward model are "
        "left out. At target: what it had cost when its own responses first reached the target."
    )
    return section("variants", "Variants", note, table(HEAD, rows))


def _row(each: VariantResult, base: VariantResult) -> list[Child]:
    if each.state != "done":
        planned = f"planned {usd(each.planned_usd)} on {each.hardware}" if each.planned_usd else ""
        cells = [usd(each.waste_usd) if each.waste_usd else ABSENT, planned]
        name: Child = [each.name, " ", badge(each.state, "quiet"), remark(each.reason)]
        return [name, *cells, *[ABSENT] * (len(HEAD) - 3)]
    return [
        [each.name, " ", _verdict(each, base)],
        usd(each.measured_usd),
        usd(each.planned_usd),
        duration(each.measured_seconds),
        memory(each.measured_peak_bytes),
        short(each.measured_flops) if each.measured_flops else ABSENT,
        decimal(each.quality),
        f"{decimal(each.difference_low)} to {decimal(each.difference_high)}",
        decimal(each.kl),
        usd(each.usd_at_target) if each.usd_at_target is not None else "never",
    ]


def _verdict(each: VariantResult, base: VariantResult) -> Markup | None:
    if each is base:
        return None
    if not each.same_quality:
        return badge("not as good", "open")
    if not each.measured_usd or not base.measured_usd:
        return badge("as good", "good")
    times = base.measured_usd / each.measured_usd
    text = f"{times:.1f} times cheaper" if times > 1 else f"{1 / times:.1f} times the cost"
    return badge(f"as good, {text}", "good" if times > 1 else "quiet")


def _decisions(found: Levers) -> Markup:
    if found.pairs_ranked_right is None or found.regret is None:
        text = "Too few variants to tell."
    else:
        text = (
            f"Of {found.pairs} pairs whose measured costs differ by more than 1.3 times the plan "
            f"ranks {percent(found.pairs_ranked_right, 0)} right. By the plan the cheapest variant "
            f"of the same quality is {found.chosen}; it costs {percent(found.regret, 1)} more than "
            f"the cheapest as measured, {found.best}."
        )
    wrong = [f"{cheaper} is cheaper than {other}, planned the other way round"
             for cheaper, other in found.wrong_pairs]  # fmt: skip
    items = bullets(wrong) if wrong else None
    return section("planner", "Would the plan have chosen the right lever?", text, items)


def _growth(found: Scale) -> Markup:
    cards = []
    for each in found.factors:
        curves = [
            Series("measured", [(p.size, p.measured_seconds) for p in each.points]),
            Series("planned", [(p.size, p.planned_seconds) for p in each.points], "second"),
        ]
        label = f"Seconds by {each.factor}"
        drawn = line_chart(curves, label, each.unit, steps=False)
        cards.append(card(each.factor, legend(curves), drawn, note=growth_line(each)))
    lead = f"Seconds of the stages' steps on {found.hardware} as one factor grows. {found.answer}"
    return section("growth", "How cost grows", lead, grid(*cards))


def growth_line(each: Growth) -> str:
    """The exponent of a factor, measured and planned."""
    return (
        f"time ~ {each.factor}^{each.exponent:.2f} ({each.exponent_low:.2f} to "
        f"{each.exponent_high:.2f}), planned {each.planned_exponent:.2f}"
    )
