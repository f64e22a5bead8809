"""The cheapest levers of a whole run, as assignments that `--set` takes."""

from dataclasses import dataclass

from config.load import validate
from config.schema import Params
from costs.planner import Target, settings
from costs.search import Goal, search, section_changes


@dataclass(frozen=True)
class Cheaper:
    """Params that train the same at less cost."""

    params: Params
    changes: tuple[str, ...]
    """`sft.micro_batch_size=16` ..., what differs."""


def cheapest(params: Params, aim: Target, stages: tuple[str, ...], goal: Goal) -> Cheaper:
    """The best levers of `stages` for `goal` that fit the device; what is learnt stays the same.

    Raises CostError where a stage fits the device with no combination.
    """
    content, changes = params.model_dump(mode="json"), []
    for stage, setting in settings(params, aim).items():
        if stage not in stages:
            continue
        for key, value in section_changes(stage, search(setting, aim.price, goal, free=False).best).items():
            if content[stage][key] != value:
                changes.append(f"{stage}.{key}={str(value).lower() if isinstance(value, bool) else value}")
                content[stage][key] = value
    return Cheaper(validate(content, "the cheapest params"), tuple(changes))
