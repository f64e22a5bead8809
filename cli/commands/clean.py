"""`rlhf clean`: list what would be removed; with --yes, remove it."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cli.project import project_root, this_command
from config.errors import UserError
from tasks.pipeline.clean import Leftover, chosen, leftovers, remove
from tasks.run.workspace import workspaces

DAY_SECONDS = 24 * 3600.0
GIB = 2**30


def clean(older_than_days: float, max_gib: float | None, yes: bool, as_json: bool) -> None:
    """Show old workspaces and checkpoints, and remove them if `yes`. Raises UserError,
    EnvironmentFault.
    """
    for name, value in (("--older-than", older_than_days), ("--max-gib", max_gib)):
        if value is not None and not value >= 0:
            raise UserError(f"{name}={value:g} must be 0 or more.")
    root = project_root()
    judged = chosen(
        leftovers(root, workspaces()),
        older_than_days * DAY_SECONDS,
        None if max_gib is None else int(max_gib * GIB),
    )
    going = [one for one in judged if one.goes]
    removed = [one for one in going if yes and remove(one)]
    if as_json:
        print(json.dumps(_content(root, judged, removed, yes), indent=2))
        return
    if judged:
        Console(highlight=False).print(_table(root, judged))
    if yes:
        print(f"Removed {len(removed)}, {_gib(removed)} GiB.")
    else:
        hint = f" Nothing was removed: {this_command()} clean --yes does it." if going else ""
        print(f"{len(going)} of {len(judged)} would go, {_gib(going)} GiB.{hint}")


def _content(
    root: Path, judged: list[Leftover], removed: list[Leftover], yes: bool
) -> dict[str, object]:
    rows = [
        {
            "kind": one.kind,
            "path": _place(root, one),
            "size_bytes": one.size_bytes,
            "age_seconds": one.age_seconds,
            "goes": one.goes,
            "removed": one in removed,
            "kept_because": _reason(one),
        }
        for one in judged
    ]
    bytes_going = sum(one.size_bytes for one in judged if one.goes)
    return {
        "dry_run": not yes,
        "items": rows,
        "going_bytes": bytes_going,
        "removed_bytes": sum(one.size_bytes for one in removed),
    }


def _table(root: Path, judged: list[Leftover]) -> Table:
    table = Table("what", "where", "size", "last written", "")
    for one in judged:
        outcome = "goes" if one.goes else f"stays: {_reason(one)}"
        table.add_row(
            one.kind,
            _place(root, one),
            f"{one.size_bytes / GIB:.2f} GiB",
            f"{one.age_seconds / DAY_SECONDS:.1f} days ago",
            outcome,
        )
    return table


def _reason(one: Leftover) -> str:
    """The table when there is nothing to remove."""
    return "" if one.goes else one.kept_because or "young and small enough"


def _place(root: Path, one: Leftover) -> str:
    return str(one.path.relative_to(root) if one.path.is_relative_to(root) else one.path)


def _gib(items: list[Leftover]) -> str:
    return f"{sum(one.size_bytes for one in items) / GIB:.2f}"
