"""The comparison of levers and the measurement of growth as Prefect tasks, with their results as
artifacts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from config.schema import Params
from config.workspace.levers import Levers, Scale
from reporting.levers_page import growth_line, levers_sentence, write_levers_page
from tasks.levers.publish import publish
from tasks.levers.scale import Measuring
from tasks.levers.study import Study
from tasks.run.stop import on_signals


def as_task(name: str, work: Callable[[], Any]) -> Any:
    """Run `work` as a task run of that name."""

    @task(name=name, cache_policy=NO_CACHE, persist_result=False)
    def run() -> Any:
        return work()

    return run()


def show_levers(params: Params, seeds: int, only: list[str]) -> str:
    """Compare the levers, a task per variant; returns the result in a sentence.

    Raises as `Study.run` does.
    """
    root = Path.cwd()
    with on_signals() as stop:
        found = Study(root, params, seeds, only, stop, as_task).run()
    page = publish(root, params, found)
    line = levers_sentence(found)
    create_table_artifact(rows(found), key="levers", description=f"{line} The page: {page}")
    return line


def rows(found: Levers) -> list[dict[str, Any]]:
    """A row of a table for each variant."""
    names = (
        "name", "state", "same_quality", "measured_usd", "planned_usd", "measured_seconds",
        "measured_peak_bytes", "quality", "difference_low", "difference_high", "kl",
    )  # fmt: skip
    return [{name: getattr(each, name) for name in names} for each in found.variants]


def show_scale(params: Params, quick: bool, only: list[str]) -> str:
    """Measure how cost grows; returns the answer in a sentence. Raises as `Measuring.run` does."""
    root = Path.cwd()
    with on_signals() as stop:
        found = as_task("measure", Measuring(root, params, quick, only, stop).run)
    page = write_levers_page(root)
    create_markdown_artifact(scale_markdown(found, page), key="scale", description=found.answer)
    return found.answer or f"{len(found.factors)} factors measured"


def scale_markdown(found: Scale, page: Path) -> str:
    """The exponents as a list."""
    lines = "\n".join(f"- {growth_line(each)}" for each in found.factors)
    return f"# How cost grows\n\n{lines}\n\n{found.answer}\n\nThe page: {page}\n"
