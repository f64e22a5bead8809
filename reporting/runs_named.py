"""Resolves the names of runs: an id, the nickname that Prefect and MLflow show, or `last`, `last-1`, ..."""

import re
from collections.abc import Sequence
from pathlib import Path

from config.errors import UserError
from config.terminal_text import shown
from config.workspace.rows import pipeline_rows

SHOWN = 10
"""Number of runs that a message lists."""


def known_runs(root: Path) -> list[str]:
    """Ids of the pipeline runs of this workspace, newest first."""
    rows = pipeline_rows(root)
    return list(dict.fromkeys(row.run_id for row in rows))[::-1]


def resolve(root: Path, names: Sequence[str]) -> list[str]:
    """The ids for `names`, in their order. Without names, the last two runs that completed; a single run is compared
    with the last of these. If none completed, the last runs.

    Raises UserError for an unknown run, fewer than two runs, or the same run twice.
    """
    run_ids = known_runs(root)
    resolved = [_resolve(name, run_ids) for name in names]
    if len(resolved) < 2:
        complete = completed_runs(root)
        others = sorted((run for run in run_ids if run not in resolved), key=lambda run: run not in complete)
        missing = 2 - len(resolved)
        if len(others) < missing:
            raise UserError(
                f"{len(run_ids)} runs were recorded in runs/pipeline.jsonl, and two are compared. {_list(run_ids)}"
            )
        resolved = [*resolved, *reversed(others[:missing])]
    twice = next((run for i, run in enumerate(resolved) if run in resolved[:i]), None)
    if twice is not None:
        raise UserError(
            f"{' and '.join(names)} name run {twice} twice, and a run is compared with other runs. {_list(run_ids)}"
        )
    return resolved


def completed_runs(root: Path) -> set[str]:
    """Ids of the runs that completed."""
    rows = pipeline_rows(root)
    return {row.run_id for row in rows if (row.event, row.state) == ("end", "completed")}


def resolve_one(root: Path, name: str) -> str:
    """The id for one name. Raises UserError for an unknown run."""
    return _resolve(name, known_runs(root))


def _resolve(name: str, run_ids: Sequence[str]) -> str:
    if name in run_ids:
        return name
    if nicknamed := [run for run in run_ids if run.partition("-")[2].partition("-")[2] == name]:
        return nicknamed[0]
    match = re.fullmatch(r"last(?:-(\d+))?", name)
    if match is None:
        raise UserError(
            f"run {shown(name)} is not in runs/pipeline.jsonl. Name a run by its id or nickname, or as "
            f"last, last-1, ... {_list(run_ids)}"
        )
    back = int(match[1] or 0)
    if back >= len(run_ids):
        raise UserError(
            f"{name} is not there: {len(run_ids)} runs were recorded in runs/pipeline.jsonl. {_list(run_ids)}"
        )
    return run_ids[back]


def _list(run_ids: Sequence[str]) -> str:
    if not run_ids:
        return "There are none yet; start one with: rlhf run"
    more = f" and {len(run_ids) - SHOWN} older ones (ls runs/pipeline)" if len(run_ids) > SHOWN else ""
    return f"Newest first: {', '.join(run_ids[:SHOWN])}{more}."
