"""Compares the planner with published measurements.

    python -m benchmarks.published_costs TABLE.yaml --json      # every row planned or refused
    python -m benchmarks.published_costs [TABLE.yaml ...] [--out docs/published-costs.md]

The second form writes the page, and the errors that intervals of other settings rest on
(costs/published/checked.yaml). Rows are planned from their printed settings; neither ids nor titles
are read, but for the sources by which errors are weighted.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from costs.published.grades import CHECKED, checked_row, grade
from costs.published.measurements import (
    Case,
    compare,
    feasibility,
    signed_quantile,
    summary,
    weighted_quantile,
)
from costs.published.table import estimates
from costs.tables.engine_names import engine_named

OPEN = (Path("../shared/cost_truth_open.yaml"), Path("../shared/cost_truth_more.yaml"))
MISS = {"memory": math.log(1.10), "time": math.log(1.25)}
"""|ln(planned / measured)| above which a row of tier A is listed as a miss."""


def read_table(file: Path) -> list[Any]:
    """The rows of a table: a list, or a mapping with `rows`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(file.read_text(encoding="utf-8"), loader)
    if isinstance(content, Mapping):
        content = content.get("rows", [content])
    return list(content) if isinstance(content, list) else []


def document(rows: list[Any], names: list[str]) -> str:
    """The markdown page."""
    found, refused = compare(rows)
    lines = [
        "# Planner against published measurements",
        "",
        f"Written by `python -m benchmarks.published_costs` from {' and '.join(names)}: "
        f"{len(rows)} rows, {len(found)} comparisons.",
        "Each row is planned from the setting it prints and from facts about its software "
        "(`costs/tables/engines.py`), never fitted by itself.",
        "Errors are factors between plan and measurement, symmetric (half and double are both "
        "100%); of a throughput, of the time it stands for.",
        "Sources weigh the same, however many rows they have. Bias: below 0 the plan is too low.",
        "",
        "| kind | tier | sources | comparisons | median | 90th percentile | bias | median, rows "
        "weighing the same |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for group in sorted({case.group for case in found}):
        for tier in ("A", "B"):
            s = summary(found, group, tier)
            if s["rows"]:
                lines.append(
                    f"| {group} | {tier} | {s['sources']:.0f} | {s['rows']:.0f} | "
                    f"{s['median']:.1%} | {s['p90']:.1%} | {s['bias']:+.1%} | "
                    f"{s['plain_median']:.1%} |"
                )
    out = feasibility(rows)
    rooms = {case.id: case.fits for case in found if case.measured and case.fits is not None}
    ran, refused_room = len(rooms), sum(not fits for fits in rooms.values())
    lines += [
        "",
        f"Out of memory as published: {sum(said for _, said in out)} of {len(out)} rows are "
        "planned as not fitting.",
        f"Ran as published: {refused_room} of {ran} rows are planned as not fitting.",
        "",
        *_grades(found),
        *_by_source(found, rows),
        *_misses(found),
        "",
        "## Refused",
        "",
        *(f"- `{row}`: {why}" for row, why in refused if "a price" not in why),
    ]
    return "\n".join(lines) + "\n"


CHOSEN_ON: dict[str, str] = {
    "litgpt": "launch time of its operations, rate of unpacking NF4, copies of its loss",
    "gpt-fast": "shares of the bandwidth that decoding reaches, 60 us a layer, 5 us a message",
    "llm-foundry": "share of the best matrix product",
    "torchtune": "copies of each loss",
    "qwen readme": "17 us a launch from Python, the second copy of a growing cache",
    "openrlhf": "share of the link that gathers for every token reach, checkpointing by default",
    "deepspeed-chat training": "22 operations a layer of a hybrid engine",
    "tensorrt-llm": "20 us a layer of decoding, 20 launches a layer of a prompt, cache in fp8",
    "lmdeploy": "40 us a layer of decoding",
    "torchtitan": "0.8 of NVIDIA's rate of matrix products on Hopper",
    "ms-swift": "a second set of logits where lengths vary, reserved memory",
}
"""Part of a source's title -> the constants that were chosen by looking at its rows."""


def _chosen(source: str) -> str:
    return next((what for part, what in CHOSEN_ON.items() if part in source.lower()), "")


def _grades(found: list[Case]) -> list[str]:
    """Grades and coverage of the intervals, each source's from the rows of the others."""
    rows = [checked_row(case) for case in found if case.measured and case.quantity != "fits"]
    counted: dict[str, list[tuple[bool, float]]] = {}
    for case in found:
        if case.tier != "A" or case.quantity == "fits" or not case.measured:
            continue
        held = grade(case, [row for row in rows if row["source"] != case.source])
        inside = held.low <= float(case.measured) / float(case.planned) <= held.high
        counted.setdefault(held.letter, []).append((inside, held.high / held.low))
    lines = [
        "## Grades of tier A, each source graded by the other sources alone",
        "",
        "| grade | comparisons | measurements inside of the interval | median width, end to end |",
        "|---|--:|--:|--:|",
    ]
    for letter, held_rows in sorted(counted.items()):
        widths = sorted(width for _, width in held_rows)
        share = sum(inside for inside, _ in held_rows) / len(held_rows)
        lines.append(
            f"| {letter} | {len(held_rows)} | {share:.0%} | {widths[len(widths) // 2]:.2f} |"
        )
    return lines


SERVERS = ("tensorrt-llm", "lmdeploy", "gpt-fast")


def without_engine(row: Any) -> Any:
    """The row as if its software had no facts of its own: a server is vLLM, all else is plain
    Transformers.
    """
    setting = row.get("setting") if isinstance(row, Mapping) else None
    if not isinstance(setting, Mapping) or "engine" not in setting:
        return row
    known, _ = engine_named(str(setting["engine"]))
    plain = {key: value for key, value in setting.items() if key != "engine"}
    if known is not None and known.iterates_micro_batches:  # the unit's meaning, not a constant
        plain = {k: v for k, v in plain.items() if k not in ("global_batch", "grad_accum")}
    if known is not None and known.name in SERVERS:
        plain["engine"] = "vLLM"
    return {**row, "setting": plain}


def _by_source(found: list[Case], rows: list[Any]) -> list[str]:
    generic = compare([without_engine(row) for row in rows])[0]
    lines = [
        "",
        "## By source, tier A",
        "",
        "Held out: the median when nothing is known of the source's software, so that none of the "
        "constants chosen on it are used:",
        "servers are planned as vLLM, all else as plain Transformers. What such software does by "
        "itself (sharding, attention) is then not known either.",
        "",
        "| source | kind | comparisons | median | bias | held out | constants chosen on it |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    kinds = sorted({(bool(_chosen(c.source)), c.source, c.group) for c in found if c.tier == "A"})
    for chosen, source, group in kinds:
        if pairs := _factors(found, source, group):
            lines.append(
                f"| {source} | {group} | {len(pairs)} | "
                f"{math.expm1(weighted_quantile(pairs, 0.5)):.1%} | "
                f"{math.expm1(signed_quantile(pairs, 0.5)):+.1%} | "
                f"{_median(generic, source, group)} | "
                f"{_chosen(source) if chosen else 'none'} |"
            )
    return lines


def _factors(found: list[Case], source: str, group: str) -> list[tuple[str, float]]:
    """Of the measurements of a source in tier A."""
    return [
        (case.source, case.factor)
        for case in found
        if (case.source, case.group, case.tier) == (source, group, "A")
        and case.measured
        and case.quantity != "fits"
    ]


def _median(found: list[Case], source: str, group: str) -> str:
    pairs = _factors(found, source, group)
    return f"{math.expm1(weighted_quantile(pairs, 0.5)):.1%}" if pairs else "-"


def _misses(found: list[Case]) -> list[str]:
    lines = [
        "",
        "## Misses of tier A",
        "",
        "Memory beyond a factor of 1.10, time beyond 1.25.",
        "",
        "| row | kind | planned / measured |",
        "|---|---|--:|",
    ]
    far = [
        case
        for case in found
        if case.tier == "A"
        and case.measured
        and case.quantity != "fits"
        and abs(case.factor) > MISS[case.group.split()[0]]
    ]
    for case in sorted(far, key=lambda case: (case.group, case.id)):
        lines.append(f"| `{case.id}` | {case.group} | {math.exp(case.factor):.2f} |")
    return lines


def write_checked(rows: Iterable[Any]) -> None:
    """The errors of both tables, on which intervals of other settings rest."""
    found, _ = compare(rows)
    lines = [
        "# Errors of the formulas on published measurements: what intervals of other settings rest "
        "on.",
        "# Written by python -m benchmarks.published_costs. error: ln(planned / measured); rate: "
        "of a throughput.",
    ]
    for case in found:
        if case.measured and case.quantity != "fits":
            lines.append(f"- {json.dumps(checked_row(case))}")
    CHECKED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE.yaml")
    parser.add_argument("--json", action="store_true", help="print every row planned or refused")
    parser.add_argument("--out", type=Path, default=Path("docs/published-costs.md"))
    options = parser.parse_args()
    tables = options.tables or list(OPEN)
    try:
        rows = [row for table in tables for row in read_table(table)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        print(f"{' '.join(map(str, tables))}: {' '.join(str(error).split())}. Name a YAML table.",
              file=sys.stderr)  # fmt: skip
        return 2
    if options.json:
        print(json.dumps({"rows": estimates(rows)}, indent=1, default=str))
        return 0
    write_checked(rows)
    options.out.write_text(document(rows, [f"`{table.name}`" for table in tables]), "utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
