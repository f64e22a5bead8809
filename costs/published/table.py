"""A table of published settings -> one estimate for every printed number, or the refusal of its
row: what `python -m benchmarks.published_costs TABLE.yaml --json` prints.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from config.errors import CostError
from costs.published.grades import grade
from costs.published.measurements import Case, cases
from costs.published.words import Refused


def estimates(
    rows: Iterable[Any], checked: Iterable[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """For each row its numbers (`id`, `quantity`, `unit`, `planned`, `low`, `high`, `grade`, and
    `error` where the row has a measurement), all in the unit that is printed; or `refused`, the
    words that were not understood.
    """
    known = None if checked is None else list(checked)
    return [found for row in rows for found in _row(row, known)]


def _row(row: Any, checked: list[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    name = row.get("id") if isinstance(row, Mapping) else None
    try:
        return [estimate(case, checked) | {"id": name} for case in cases(row)]
    except Refused as error:
        return [{"id": name, "refused": list(error.words)}]
    except CostError as error:
        return [{"id": name, "refused": [str(error)]}]
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        # whatever a row holds, the others are still planned
        return [{"id": name, "refused": [f"the formulas can not plan this setting: {error!r}"]}]


def estimate(case: Case, checked: Iterable[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """One number with its interval and grade; `error` is planned / measured - 1, of `fits` 0 where
    the plan is right and 1 where it is not.
    """
    held = grade(case, checked)
    found: dict[str, Any] = {
        "id": case.id,
        "quantity": case.quantity,
        "unit": case.unit,
        "planned": case.planned,
    }
    if case.quantity == "fits":
        found |= {"low": case.planned, "high": case.planned}
    else:
        found |= {"low": case.planned * held.low, "high": case.planned * held.high}
    found |= {
        "grade": held.letter,
        "comparable": {"rows": held.rows, "why": held.why},
        "assumptions": list(case.planning.assumptions),
        "without_effect": list(case.planning.printed.without_effect),
    }
    if case.fits is not None:
        found["fits"] = case.fits
    if case.measured is not None:
        found |= {"measured": case.measured, "error": case.error}
    return found
