"""The cheapest levers of a whole run: what the searches of its stages have to agree on, and what
changes in params.yaml.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from config.errors import CostError
from config.load import validate
from config.records import SAMPLING_METHODS
from config.schema import Params
from config.sections.levers import Lora
from config.sections.where import can_be_divided
from costs.formulas.setting import Levers
from costs.planning.search import Found, Goal, search, section_changes
from costs.planning.settings import settings
from costs.planning.target import Target


@dataclass(frozen=True)
class Cheaper:
    """Params that train the same at less cost; with adapters, the same stages."""

    params: Params
    changes: tuple[str, ...]
    """`sft.micro_batch_size=16` ..., what differs."""
    found: dict[str, Found]
    """The search of each stage."""


def cheapest(
    params: Params, aim: Target, stages: tuple[str, ...], goal: Goal, adapters: bool = False
) -> Cheaper:
    """The best levers of `stages` for `goal` that fit the device; with `adapters` LoRA and four
    bits are levers too.

    Raises CostError where a stage fits the device with no combination.
    """
    storages = (
        ("nf4", None) if adapters and params.model.random is None else (params.model.quantisation,)
    )
    tried: list[tuple[float, str | None, dict[str, Found]]] = []
    refusal: CostError | None = None
    for quantisation in storages:
        stored = params.model_copy(
            update={"model": params.model.model_copy(update={"quantisation": quantisation})}
        )
        try:
            found = {
                stage: search(
                    setting,
                    aim.of(params, stage).price,
                    goal,
                    adapters=adapters,
                    free=False,
                    allowed=allowed_levers(params, stage, quantisation),
                    like=adapter_beside(params, stage),
                )
                for stage, setting in settings(stored, aim).items()
                if stage in stages
            }
        except CostError as error:
            refusal = error
            continue
        tried.append((_value(found, goal), quantisation, found))
    if not tried:
        assert refusal is not None
        raise refusal
    _, quantisation, found = min(reversed(tried), key=lambda each: each[0])
    content = changed(params, found, quantisation)
    made = validate(content, "the cheapest params")
    return Cheaper(made, _assignments(params.model_dump(mode="json"), content), found)


def allowed_levers(
    params: Params, stage: str, quantisation: str | None
) -> Callable[[Levers], bool]:
    """Which levers of a stage go with this storage of frozen weights, and with the checks of
    config/schema.py.
    """
    learnt_nothing = params.model.random is not None and (
        stage == "sft" or (stage == "reward" and params.reward.init == "base")
    )

    there = adapter_beside(params, stage)
    unlike = stage == "sft" and any(
        other is not None and there is not None and other.difference(there)
        for other in (params.section(copy).lora for copy in params.start_from_sft)
    )
    sharding = params.where.of(stage).sharding

    def allowed(levers: Levers) -> bool:
        if not can_be_divided(sharding, levers.optimizer, quantisation):
            return False
        if levers.tuning == "lora":
            return levers.quantisation == quantisation and not learnt_nothing and not unlike
        # the policy would learn from other weights than its reference has
        return not (quantisation and stage in SAMPLING_METHODS)

    return allowed


def adapter_beside(params: Params, stage: str) -> Lora | None:
    """What a new adapter of `stage` has to be like: those of the SFT model and of what starts from
    it are copies of one.
    """
    related = ("sft", *params.start_from_sft)
    if stage not in related:
        return None
    found = (params.section(other).lora for other in related)
    return next((lora for lora in found if lora is not None), None)


def _value(found: dict[str, Found], goal: Goal) -> float:
    best = [each.best for each in found.values()]
    if goal == "memory":
        return max((each.device_bytes for each in best), default=0.0)
    return sum(each.usd if goal == "usd" else each.seconds for each in best)


def changed(params: Params, found: dict[str, Found], quantisation: str | None) -> dict[str, Any]:
    """The content of params.yaml with the winners' levers; an adapter that is there stays as
    it is.
    """
    content = params.model_dump(mode="json")
    for stage, each in found.items():
        own = section_changes(stage, each.best)
        if content[stage].get("lora") is not None:
            own.pop("lora", None)
        like = adapter_beside(params, stage)
        if "lora" in own and like is not None:
            own["lora"] = like.model_dump(mode="json") | {"dropout": 0.0}
        content[stage] |= own
    if any(each.best.setting.levers.tuning == "lora" for each in found.values()):
        content["model"]["quantisation"] = quantisation
    return content


def _assignments(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """What differs, as `--set` takes it."""
    return tuple(
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in after
        if isinstance(after[section], dict)
        for key, value in after[section].items()
        if before[section][key] != value
    )
