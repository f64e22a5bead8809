"""`rlhf study`: runs that differ in a few settings, and one table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.levers import AsJson, until_stopped
from cli.project import project_root, typed_path

if TYPE_CHECKING:
    from rich.table import Table

    from config.workspace.study import StudyResult


def study(
    file: Annotated[
        Path, typer.Argument(parser=typed_path, metavar="FILE", help="Such as studies/levers.yaml.")
    ],
    as_json: AsJson = False,
) -> None:
    """Run every variant of a study with every seed, and compare cost and quality with the first
    variant's. What two variants share is made once; the same command goes on after Ctrl-C.
    """
    root = project_root()
    from config.workspace.study import read_study
    from tasks.study.result import result
    from tasks.study.runs import STUDIES, run_all

    content, name = read_study(file), file.stem

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    outcomes = until_stopped(lambda stop: run_all(root, name, content, stop, say))
    found = result(root / STUDIES / name, content, outcomes)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    console.print(study_table(found))
    console.print(summary(found, root / STUDIES / name), markup=False, soft_wrap=True)


def study_table(found: "StudyResult") -> "Table":
    """A row for each variant. Fits 80 columns."""
    from rich.table import Table

    from reporting.numbers import decimal, usd

    table = Table(box=None, header_style="bold")
    table.add_column("variant", max_width=24)
    for title in ("planned", "measured", found.judge, "difference (95%)"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    for each in found.variants:
        if each.measured_usd is None or each.difference is None:
            table.add_row(each.name, "", "", "", "", f"not run: {each.reason}")
            continue
        low, high = each.difference_low or 0.0, each.difference_high or 0.0
        table.add_row(
            each.name,
            usd(each.planned_usd or 0.0),
            usd(each.measured_usd),
            decimal(each.quality or 0.0),
            "" if each.verdict == "base" else f"{low:+.3f} to {high:+.3f}",
            each.verdict,
        )
    return table


def summary(found: "StudyResult", place: Path) -> str:
    """The plan's ranking, the cost, and where the runs are."""
    from reporting.numbers import percent, usd

    right = found.pairs_ranked_right
    lines = [] if right is None else [f"The plan ranks {percent(right)} of the pairs rightly."]
    if found.regret is not None:
        lines.append(f"The cheapest by the plan cost {percent(found.regret)} more than need be.")
    lines.append(f"Spent: {usd(found.spent_usd)}. As good: within {found.margin:g}.")
    lines.append(f"Runs: {place}; rlhf compare there shows two of them side by side.")
    return "\n".join(lines)
