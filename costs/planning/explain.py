"""The calculation behind a plan as a trail, and what more of each input does to it.

The trail is recorded while the plan is made (costs/quantities.py): it is no second copy of any
formula. What an input does is found by planning again with 10% more of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from config.errors import CostError
from config.records import LOOPS, SAMPLING_METHODS
from config.schema import Params
from costs.formulas.setting import Setting
from costs.planning.data_stage import plan_data
from costs.planning.inputs import Inputs
from costs.planning.plans import Plan, StagePlan
from costs.planning.rows import count
from costs.planning.settings import base_shape, setting_of
from costs.planning.stages import plan_stage
from costs.planning.target import Target
from costs.quantities import Quantity, formula, recording, steps

MORE = 1.1
"""Of an input, for the table of what inputs do."""
WHOLE = ("tensor_parallel", "accumulation", "gpus", "rented", "micro_batch_size")
"""Inputs of which there is no tenth more, whatever they go into."""
MONEY_AND_PLACES = ("budget", "prices", "retrain", "tracking", "where")
"""Sections of params.yaml whose numbers are no inputs of a stage's own plan."""

Make = Callable[[Inputs], Plan]


@dataclass(frozen=True)
class Step:
    """One quantity of the trail."""

    name: str
    value: float
    unit: str
    formula: str
    """Of its terms, in Python's notation; empty for an input and a constant."""
    terms: Mapping[str, float]
    """Name -> value of each term of the formula."""
    meaning: str
    source: str
    depth: int
    """How many formulas lie between it and a total."""


class Needs(NamedTuple):
    """What is asked of a plan, or of a part of it."""

    memory_bytes: float
    seconds: float
    usd: float


@dataclass(frozen=True)
class Effect:
    """What 10% more of an input does: relative changes, None where that input goes in steps that
    10% more is none of.
    """

    input: str
    value: float
    unit: str
    source: str
    memory: float | None
    time: float | None
    usd: float | None


@dataclass(frozen=True)
class Explanation:
    """How the numbers of a plan, a stage or a phase came about."""

    of: str
    trail: tuple[Step, ...]
    effects: tuple[Effect, ...]

    def as_json(self) -> dict[str, Any]:
        """The object that `rlhf plan --explain --json` prints."""
        return asdict(self)


def explain_params(
    params: Params, aim: Target, stages: Sequence[str], asked: str, file: str
) -> Explanation:
    """The trail of a run's plan: of `asked`, a stage or STAGE.PHASE, or of all where it is empty.

    file: what params were read from, as a source. Raises CostError for an unknown stage or phase.
    """
    stage, _, phase = asked.partition(".")
    if stage and stage not in stages:
        raise CostError(
            f"--explain {asked}: {stage} is not a stage of this plan. Known: {', '.join(stages)}."
        )
    chosen, one = (stage,) if stage else tuple(stages), stage_from(params, aim, file)
    return explained_plan(
        lambda inputs: Plan(tuple(one(name, inputs) for name in chosen)), stage, phase
    )


def stage_from(params: Params, aim: Target, file: str) -> Callable[[str, Inputs], StagePlan]:
    """What plans a stage of a run from its inputs."""
    rows, model = count(params, aim.root), base_shape(params, aim.root)

    def one(name: str, inputs: Inputs) -> StagePlan:
        own = aim.of(params, name)
        device, cost = own.hardware, own.price
        own = replace(
            own,
            hardware=inputs.of(device, "hardware", f"{device.source}, read {device.date}"),
            price=inputs.of(cost, "price", f"{cost.source}, read {cost.date}"),
            gpus=inputs.number(own.gpus, "gpus", "--gpus, or where.default and where.STAGE"),
            rented=inputs.number(own.rented, "rented", "most processes of a stage beside it"),
            by_stage=False,
            by_pool=False,
        )
        known = inputs.of(rows, "rows", "; ".join(rows.assumptions))
        said = inputs_of_params(params, inputs, file)
        if name == "data":
            share = said.data.test_fraction
            return plan_data(known, share, own.hardware, own.gpus, own.price, own.rented)
        shape = inputs.of(model, "model", f"config.json of {model.name}")
        setting = setting_of(said, own, name, known, shape)
        return plan_stage(with_facts(setting, inputs, file), own.price, find_lever=False)

    return one


def inputs_of_params(params: Params, inputs: Inputs, file: str) -> Params:
    """Params whose numbers are inputs."""
    sections = [name for name in type(params).model_fields if name not in MONEY_AND_PLACES]
    found = {
        name: inputs.of(section, name, file)
        for name in sections
        if isinstance(section := getattr(params, name), BaseModel)
    }
    return params.model_copy(update=found)


def with_facts(setting: Setting, inputs: Inputs, file: str) -> Setting:
    """A setting whose numbers are inputs: those that are none yet are the software's, the
    device's, and what follows from params.
    """
    named = {
        "engine": f"costs/tables/engines.py, {setting.engine.name}",
        "efficiency": "costs/tables/rates.py",
        "hardware": f"{setting.hardware.source}, read {setting.hardware.date}",
        "model": f"config.json of {setting.model.name}",
    }
    made = f"{file}, costs/planning/settings.py"
    return inputs.of(setting, "", lambda name: named.get(name.split(".")[0], made))


def explained_plan(make: Make, stage: str, phase: str) -> Explanation:
    """The trail of what `make` plans; of one stage's phase where that is named."""
    with recording():
        plan = make(Inputs())
    roots = roots_of(plan, stage, phase)
    inputs = inputs_below(roots)
    before = _needs(plan, phase)
    whole = whole_steps(roots)
    effects = [
        _nothing(each) if each.name in whole else _effect(make, each, before, phase)
        for each in inputs
    ]
    telling = [each for each in effects if each.memory is None or _tells(each)]
    telling.sort(key=lambda each: -max(abs(n or 0.0) for n in (each.time, each.usd, each.memory)))
    depth = None if phase else 2
    of = f"{stage}.{phase}" if phase else stage or "the run"
    return Explanation(of, tuple(trail(roots, depth)), tuple(telling))


def _tells(effect: Effect) -> bool:
    return any(abs(each or 0.0) >= 5e-5 for each in (effect.memory, effect.time, effect.usd))


def _effect(make: Make, each: Quantity, before: Needs, phase: str) -> Effect:
    try:
        after = _needs(make(Inputs(each.name, MORE)), phase)
    except CostError:
        return _nothing(each)
    changes = [float(b) / float(a) - 1 if a else 0.0 for a, b in zip(before, after, strict=True)]
    return Effect(each.name, float(each), each.unit, each.source, *changes)


def _nothing(each: Quantity) -> Effect:
    return Effect(each.name, float(each), each.unit, each.source, None, None, None)


def whole_steps(roots: Sequence[Quantity]) -> set[str]:
    """Names of the inputs that are counted whole: what they go into is divided without a rest."""
    divided = [each for each in _all_below(roots) if each.operation == "//"]
    inputs = {each.name for each in inputs_below(divided)}
    return inputs | {each.name for each in inputs_below(roots) if each.name.endswith(WHOLE)}


def _needs(plan: Plan, phase: str) -> Needs:
    if phase:
        found = _phase(plan.stages[0], phase)
        return Needs(found.peak_bytes, found.seconds, found.usd)
    total = plan.total
    return Needs(total["peak_bytes_per_gpu"], total["seconds"], total["usd"]["expected"])


def _phase(stage: StagePlan, phase: str) -> Any:
    known = [each.phase for each in stage.phases]
    if phase not in known:
        raise CostError(
            f"--explain {stage.stage}.{phase}: {phase} is not a phase of {stage.stage}. Known: "
            f"{', '.join(known)}."
        )
    return stage.phases[known.index(phase)]


# ---------------------------------------------------------------- the trail


def roots_of(plan: Plan, stage: str, phase: str) -> list[Quantity]:
    """The totals that are explained, and everything that has a name in a plan under that name."""
    for each in plan.stages:
        _name_parts(each, "" if stage else f"{each.stage}.")
    if phase:
        one = _phase(plan.stages[0], phase)
        found: dict[str, tuple[Any, str]] = {
            f"{phase}.seconds": (one.seconds, "s"),
            f"{phase}.usd": (one.usd, "USD"),
            f"{phase}.flops": (one.flops, "FLOP"),
            f"{phase}.bytes_moved": (one.bytes_moved, "B"),
            f"{phase}.peak_bytes": (one.peak_bytes, "B"),
        }
    elif stage:
        (own,) = plan.stages
        found = {name: (value, unit) for name, value, unit in _totals(own)}
    else:
        total = plan.total
        found = {
            "total.seconds": (total["seconds"], "s"),
            "total.gpu_hours": (total["gpu_hours"], "h"),
            "total.kwh": (total["kwh"], "kWh"),
            "total.usd": (total["usd"]["expected"], "USD"),
            "total.peak_bytes_per_gpu": (total["peak_bytes_per_gpu"], "B"),
        }
    return [_called(value, name, unit) for name, (value, unit) in found.items() if value]


def _totals(stage: StagePlan) -> list[tuple[str, Any, str]]:
    return [
        ("seconds", stage.seconds, "s"),
        ("gpu_hours", stage.gpu_hours, "h"),
        ("kwh", stage.kwh, "kWh"),
        ("usd", stage.usd.expected, "USD"),
        ("peak_bytes_per_gpu", stage.peak_bytes_per_gpu, "B"),
        ("device_bytes_per_gpu", stage.device_bytes_per_gpu, "B"),
    ]


def _name_parts(stage: StagePlan, prefix: str) -> None:
    """Names for what a plan has names for: phases, parts of memory, totals."""
    timed = "costs/planning/phases.py"
    if stage.stage in LOOPS:
        own = "ppo" if stage.stage in SAMPLING_METHODS else "distillation"
        timed = f"costs/formulas/{own}.py"
    for phase in stage.phases:
        _rename(phase.seconds, f"{prefix}{phase.phase}.seconds", "s", timed)
        _rename(phase.usd, f"{prefix}{phase.phase}.usd", "USD", SUMMED)
        _rename(phase.peak_bytes, f"{prefix}{phase.phase}.peak_bytes", "B", HELD)
    for role, parts in stage.memory.items():
        for part, size in parts.items():
            _rename(size, f"{prefix}{role}.{part}", "B", HELD)
    for name, value, unit in _totals(stage):
        _rename(value, f"{prefix}{name}", unit, HELD if unit == "B" else SUMMED)


SUMMED, HELD = "costs/planning/stages.py", "costs/planning/moments.py"
"""Sources of a stage's sums, and of what is in memory at its peak."""


def _rename(value: Any, name: str, unit: str, source: str) -> None:
    """A result gets its name in the plan; an input keeps its own."""
    if isinstance(value, Quantity) and value.operation and not value.name:
        value.name, value.unit, value.source = name, unit, source


def _called(value: Any, name: str, unit: str) -> Quantity:
    """A total under its name in the plan."""
    if isinstance(value, Quantity) and value.name == name:
        return value
    made = Quantity(value, "=", (value,))
    made.name, made.unit, made.source = name, unit, "costs/planning/plans.py"
    return made


def inputs_below(roots: Sequence[Quantity]) -> list[Quantity]:
    """Every input that the totals were made of, once each."""
    found = [each for each in _all_below(roots) if each.is_input]
    return list({each.name: each for each in found}.values())


def _all_below(roots: Sequence[Quantity]) -> list[Quantity]:
    found: dict[int, Quantity] = {}
    stack: list[float] = list(roots)
    while stack:
        each = stack.pop()
        if isinstance(each, Quantity) and id(each) not in found:
            found[id(each)] = each
            stack += each.terms
    return list(found.values())


def trail(roots: Sequence[Quantity], depth: int | None = None) -> list[Step]:
    """The totals and what they were made of, each quantity once, under the first that needs it; to
    so many formulas deep, all where that is None.
    """
    label = _Labels()
    found: dict[str, Step] = {}

    def add(each: Quantity, at: int) -> None:
        name = label(each)
        if name in found:
            return
        terms = steps(each)
        found[name] = Step(
            name,
            float(each),
            each.unit,
            formula(each, label),
            {label(term): float(term) for term in terms},
            each.meaning,
            each.source,
            at,
        )
        if depth is None or at < depth:
            for term in terms:
                add(term, at + 1)

    for root in roots:
        add(root, 0)
    return list(found.values())


class _Labels:
    """Names of quantities: two of one name that came about alike are one, others are numbered."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[float, str]]] = {}
        self._of: dict[int, tuple[Quantity, str]] = {}

    def __call__(self, each: Quantity) -> str:
        if id(each) in self._of:
            return self._of[id(each)][1]
        made = (float(each), formula(each, self))
        alike = self._known.setdefault(each.name, [])
        if made not in alike:
            alike.append(made)
        place = alike.index(made)
        name = f"{each.name}_{place + 1}" if place else each.name
        self._of[id(each)] = (each, name)
        return name
