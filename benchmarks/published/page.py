"""docs/published-costs.md."""

import math
from collections.abc import Sequence

from benchmarks.published.checked import HELD, coverage, interval, kinds, widening
from benchmarks.published.errors import signed_quantile, summary, weighted_quantile
from benchmarks.published.measurements import Case
from benchmarks.published.row import LOOPS

MISS = {"memory": math.log(1.10), "time": math.log(1.25)}
"""|ln(planned / measured)| above which a held-out row of tier A is listed."""


def document(found: Sequence[Case], held_out: Sequence[Case]) -> str:
    """The page. `found` is planned by the shared rates as they are, `held_out` by rates fitted to the other
    sources.
    """
    sources = {case.source for case in found}
    lines = [
        "# The planner against published measurements",
        "",
        "Written by `python -m benchmarks.published_costs` from the typed rows in `benchmarks/published/rows`:",
        f"{len({case.id for case in found})} rows of {len(sources)} sources, {len(found)} "
        "measurements. [planning.md](planning.md) describes how to write a row.",
        "",
        "Held out: the shared rates (`costs/tables/rates.py`) are fitted to the other sources, and "
        "launch times that were",
        "chosen on a source's software are those of similar software. Errors are factors, "
        "symmetric: half and double are",
        "both 100%. Sources weigh the same. Bias below 0: the plan is too low. Tier A: the source "
        "states everything that decides.",
        "",
        "What was held out is the rates and the launch times. The formulas themselves were written "
        "and chosen with these rows in",
        "sight, and the fixed time of a loop's step comes from DeepSpeed-Chat's log, so that rows "
        "that have not been seen will be planned worse.",
        "Three things about rows were settled after their errors had been seen: the loss that "
        "torchtune had in September 2024 and the",
        "CUDA context of the Transformers page (without both, memory of training, tier A, is 13.0% "
        "in the median and 33.8% at 90%),",
        "and the settings of DeepSpeed-Chat's step 3, which its table leaves out and its scripts have.",
        "",
        *_kinds(found, held_out),
        "",
        *_loops(held_out),
        *_fits(found),
        "",
        *_grades(held_out),
        "",
        *_by_source(found, held_out),
        "",
        *_misses(held_out),
    ]
    return "\n".join(lines) + "\n"


def _kinds(found: Sequence[Case], held_out: Sequence[Case]) -> list[str]:
    lines = [
        "| kind | tier | sources | rows | median | held out: median | 90% | bias |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for group in sorted({case.group for case in found}):
        for tier in ("A", "B"):
            fitted, other = summary(found, group, tier), summary(held_out, group, tier)
            if fitted["rows"]:
                lines.append(
                    f"| {group} | {tier} | {fitted['sources']:.0f} | {fitted['rows']:.0f} | {fitted['median']:.1%} | "
                    f"{other['median']:.1%} | {other['p90']:.1%} | {other['bias']:+.1%} |"
                )
    return lines


def _loops(held_out: Sequence[Case]) -> list[str]:
    factors = [
        math.exp(abs(case.factor))
        for case in held_out
        if case.planning.setting.stage in LOOPS and case.group.startswith("time")
    ]
    within = {bound: sum(factor <= bound for factor in factors) for bound in (1.5, 2.5)}
    return [
        f"PPO and GRPO steps, held out: {within[1.5]} of {len(factors)} within a factor of 1.5, "
        f"{within[2.5]} within 2.5."
    ]


def _fits(found: Sequence[Case]) -> list[str]:
    oom = [case for case in found if case.quantity == "fits" and case.measured is False]
    ran = {case.id: case.fits for case in found if case.measured and case.fits is not None}
    return [
        f"Out of memory as published: {sum(not case.planned for case in oom)} of {len(oom)} are "
        "planned as not fitting.",
        f"Ran as published: {sum(not fits for fits in ran.values())} of {len(ran)} are planned as not fitting.",
    ]


def _grades(held_out: Sequence[Case]) -> list[str]:
    """Intervals of each source, from the errors of the others."""
    lines = [
        "## Intervals",
        "",
        f"An interval is as wide as it takes for those of other sources to hold {HELD:.0%} of a "
        "source's held-out measurements,",
        "so the shares below are reached by construction.",
        "`costs/tables/checked.yaml` has them.",
        "",
        "| kind | measurements | inside | width, end to end |",
        "|---|--:|--:|--:|",
    ]
    for kind, cases in sorted(kinds(held_out).items()):
        if len({case.source for case in cases}) < 3:
            continue
        low, high = interval(cases)
        inside = coverage(cases, widening(cases))
        lines.append(f"| {' '.join(kind)} | {len(cases)} | {inside:.0%} | {high / low:.2f} |")
    return lines


def _by_source(found: Sequence[Case], held_out: Sequence[Case]) -> list[str]:
    lines = [
        "## By source, tier A",
        "",
        "| source | kind | rows | median | held out: median | bias |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for source, group in sorted({(case.source, case.group) for case in found if case.tier == "A"}):
        fitted, other = _factors(found, source, group), _factors(held_out, source, group)
        if fitted:
            lines.append(
                f"| {source} | {group} | {len(fitted)} | {math.expm1(weighted_quantile(fitted, 0.5)):.1%} | "
                f"{math.expm1(weighted_quantile(other, 0.5)):.1%} | {math.expm1(signed_quantile(other, 0.5)):+.1%} |"
            )
    return lines


def _factors(found: Sequence[Case], source: str, group: str) -> list[tuple[str, float]]:
    """Of the measurements of a source in tier A."""
    return [
        (case.source, case.factor)
        for case in found
        if (case.source, case.group, case.tier) == (source, group, "A") and case.measured and case.quantity != "fits"
    ]


def _misses(held_out: Sequence[Case]) -> list[str]:
    far = [
        case
        for case in held_out
        if case.tier == "A"
        and case.measured
        and case.quantity != "fits"
        and abs(case.factor) > MISS[case.group.split()[0]]
    ]
    return [
        "## Misses of tier A, held out",
        "",
        "Memory beyond a factor of 1.10, time beyond 1.25.",
        "",
        "| row | kind | planned / measured |",
        "|---|---|--:|",
        *(
            f"| `{case.id}` | {case.group} | {math.exp(case.factor):.2f} |"
            for case in sorted(far, key=lambda case: (case.group, case.id))
        ),
    ]
