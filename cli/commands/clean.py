"""`rlhf clean`: list what would be removed; with --yes, remove it."""

import json
from pathlib import Path

from rich.table import Table

from cli.project import project_root, this_command
from cli.terminal import Terminal
from config.errors import UserError
from tasks.pipeline.clean import Leftover, chosen, leftovers, remove

DAY_SECONDS = 24 * 3600.0
GIB = 2**30


def clean(older_than_days: float, max_gib: float | None, yes: bool, as_json: bool) -> None:
    """Show old checkpoints, studies and outputs, and remove them if `yes`. Raises UserError, EnvironmentFault."""
    for name, value in (("--older-than", older_than_days), ("--max-gib", max_gib)):
        if value is not None and not value >= 0:
            raise UserError(f"{name}={value:g} must be 0 or more.")
    root = project_root()
    judged = chosen(leftovers(root), older_than_days * DAY_SECONDS, None if max_gib is None else int(max_gib * GIB))
    going = [leftover for leftover in judged if leftover.goes]
    removed = [leftover for leftover in going if yes and remove(leftover)]
    if as_json:
        print(json.dumps(_content(root, judged, removed, yes), indent=2))
        return
    if judged:
        Terminal().print(_table(root, judged))
    if yes:
        print(f"Removed {len(removed)}, {_gib(removed)} GiB.")
    else:
        hint = f" Nothing was removed: {this_command()} clean --yes does it." if going else ""
        print(f"{len(going)} of {len(judged)} would go, {_gib(going)} GiB.{hint}")


def _content(root: Path, judged: list[Leftover], removed: list[Leftover], yes: bool) -> dict[str, object]:
    rows = [
        {
            "kind": leftover.kind,
            "path": _place(root, leftover),
            "size_bytes": leftover.size_bytes,
            "age_seconds": leftover.age_seconds,
            "goes": leftover.goes,
            "removed": leftover in removed,
            "kept_because": _reason(leftover),
        }
        for leftover in judged
    ]
    bytes_going = sum(leftover.size_bytes for leftover in judged if leftover.goes)
    return {
        "dry_run": not yes,
        "items": rows,
        "going_bytes": bytes_going,
        "removed_bytes": sum(leftover.size_bytes for leftover in removed),
    }


def _table(root: Path, judged: list[Leftover]) -> Table:
    table = Table("what", "where", "size", "last written", "")
    for leftover in judged:
        outcome = "goes" if leftover.goes else f"stays: {_reason(leftover)}"
        table.add_row(
            leftover.kind,
            _place(root, leftover),
            f"{leftover.size_bytes / GIB:.2f} GiB",
            f"{leftover.age_seconds / DAY_SECONDS:.1f} days ago",
            outcome,
        )
    return table


def _reason(leftover: Leftover) -> str:
    """The table when there is nothing to remove."""
    return "" if leftover.goes else leftover.kept_because or "young and small enough"


def _place(root: Path, leftover: Leftover) -> str:
    return str(leftover.path.relative_to(root) if leftover.path.is_relative_to(root) else leftover.path)


def _gib(items: list[Leftover]) -> str:
    return f"{sum(leftover.size_bytes for leftover in items) / GIB:.2f}"
