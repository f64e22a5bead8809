"""A YAML table of typed rows -> rows, and one estimate for every measured number."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published.checked import kind
from benchmarks.published.measurements import Case, cases
from benchmarks.published.row import Row, read_row
from config.errors import CostError
from costs.planning.grades import grade_of

ROWS = Path(__file__).parent / "rows"
"""One file for each source."""


def read_table(file: Path) -> list[dict[str, Any]]:
    """The rows of a file as they are written, each with the file's `source` and with its `run` on top of the file's. A
    file that is a list of rows has nothing in common to add.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(file.read_text(encoding="utf-8"), loader)
    if not isinstance(content, Mapping):
        return list(content) if isinstance(content, list) else [content]
    common = {"source": str(content.get("source", file.stem))}
    shared = content.get("run") or {}
    return [
        {**common, **row, "run": {**shared, **(row.get("run") or {})}} if isinstance(row, Mapping) else row
        for row in content.get("rows", [])
    ]


def typed(rows: Iterable[Any]) -> tuple[list[Row], list[tuple[str, str]]]:
    """(typed rows, (id, mistakes) of the others)."""
    result: list[Row] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            result.append(read_row(row))
        except CostError as error:
            refused.append((_id(row), str(error)))
    return result, refused


def published() -> list[Row]:
    """Every row in `rows/`. Raises Refused for a mistake in one."""
    return [read_row(row) for file in sorted(ROWS.glob("*.yaml")) for row in read_table(file)]


def estimates(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """For each row its numbers (`id`, `quantity`, `unit`, `planned`, `low`, `high`, `basis`, and `error` where the row
    has a measurement), in the unit of the measurement; or `refused`, the mistakes of the row.
    """
    return [result for row in rows for result in _row(row)]


def _id(row: Any) -> str:
    return str(row.get("id")) if isinstance(row, Mapping) else repr(row)[:60]


def _row(row: Any) -> list[dict[str, Any]]:
    try:
        return [estimate(case) for case in cases(read_row(row))]
    except CostError as error:
        return [{"id": _id(row), "refused": str(error).split("; ")}]


def estimate(case: Case) -> dict[str, Any]:
    """One number; `error` is planned / measured - 1, of `fits` 0 where the plan is right and 1 where it is not."""
    setting = case.planning.setting
    held = grade_of(
        " ".join(kind(case)),
        setting.model.parameters / 1e9,
        setting.hardware.generation,
        case.planning.run.engine is not None,
    )
    low, high = held.low, held.high
    if case.quantity == "throughput":  # the interval of the time it stands for
        low, high = 1 / high, 1 / low
    result: dict[str, Any] = {
        "id": case.id,
        "quantity": case.quantity,
        "unit": case.unit,
        "planned": case.planned,
        "low": case.planned if case.quantity == "fits" else case.planned * low,
        "high": case.planned if case.quantity == "fits" else case.planned * high,
        "basis": held.basis,
        "why": held.why,
        "assumptions": list(case.planning.assumptions),
    }
    if case.fits is not None:
        result["fits"] = case.fits
    if case.measured is not None:
        result |= {"measured": case.measured, "error": case.error}
    return result
