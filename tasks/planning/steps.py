"""Number of steps of a stage, from its parameters and the prepared rows."""

from pathlib import Path

from config.records import LOOPS
from config.schema import Params
from config.sections.offline import Optimisation
from config.sections.online import SamplingLoop
from costs.planning.settings import evaluated


def planned_steps(root: Path, params: Params, stage: str) -> int | None:
    """How many steps the stage will take, None if that cannot be known before it ends."""
    match stage:
        case "sft":
            return _optimizer_steps(params.sft, _rows(root, "sft"))
        case "reward":
            trained = params.trained_reward
            return None if trained is None else _optimizer_steps(trained, _rows(root, "preference"))
        case name if name in LOOPS:
            loop: SamplingLoop = params.section(name)
            return loop.updates
        case "dpo":
            return _optimizer_steps(params.section("dpo"), _rows(root, "preference"))
        case "kto":
            pairs, ratings = (_rows(root, dataset) or 0 for dataset in ("preference", "ratings"))
            return _optimizer_steps(params.section("kto"), 2 * pairs + ratings)
        case "evaluate":
            return evaluated(params)  # a step for each model
        case _:
            return None


def _optimizer_steps(settings: Optimisation, rows: int | None) -> int | None:
    return settings.optimizer_steps(rows) if rows else settings.max_steps


def _rows(root: Path, dataset: str) -> int | None:
    try:
        with (root / "data" / "prepared" / dataset / "train.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return None
