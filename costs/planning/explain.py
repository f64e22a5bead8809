"""Explains a plan: the work of each phase and its time in isolation, memory at the peak, and the
effect of 10% more of each input, found by planning again.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from config.errors import CostError
from config.schema import Params
from costs.formulas.compute import Work
from costs.formulas.setting import Setting
from costs.formulas.time import (
    attention_seconds,
    launch_seconds,
    matmul_rate,
    paging_seconds,
    sent_seconds,
    unpacking_seconds,
)
from costs.planning.phases import phases
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.settings import settings
from costs.planning.stages import plan_stage
from costs.planning.target import Target
from costs.tables.catalogue import Price

MORE = 1.1
"""Increase of an input in the table of inputs."""
TELLING = 0.0005
"""Relative change below which an input is left out."""


@dataclass(frozen=True)
class Resource:
    """One resource used by a phase."""

    name: str
    amount: float
    unit: str
    seconds: float | None
    """Seconds in isolation; None with calibrated rates, which do not separate resources."""
    formula: str
    source: str


@dataclass(frozen=True)
class PhaseReason:
    """A phase and what it asks for."""

    stage: str
    phase: str
    seconds: float
    usd: float
    peak_bytes: float
    bound: str
    resources: tuple[Resource, ...] = ()


@dataclass(frozen=True)
class Effect:
    """Relative changes by 10% more of an input."""

    input: str
    value: float
    unit: str
    source: str
    memory: float
    time: float
    usd: float


@dataclass(frozen=True)
class Explanation:
    """Explanation of a run, a stage or a phase."""

    of: str
    seconds: float
    usd: float
    peak_bytes: float
    phases: tuple[PhaseReason, ...]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    """role -> part -> bytes at the stage's peak; empty for a run."""
    effects: tuple[Effect, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object that `rlhf plan explain --json` prints."""
        return asdict(self)


def explain_params(params: Params, aim: Target, stages: Sequence[str], asked: str) -> Explanation:
    """Why `asked` (a stage, STAGE.PHASE, or empty for the run) is planned as it is. Raises
    CostError for an unknown stage or phase.
    """
    stage, _, phase = asked.partition(".")
    if stage and stage not in stages:
        raise CostError(
            f"plan explain {asked}: {stage} is not a stage of this plan. "
            f"Known: {', '.join(stages)}."
        )
    chosen = (stage,) if stage else tuple(stages)
    found = settings(params, aim)
    planned = plan(params, aim, chosen).stages
    reasons = [
        reason for each in planned for reason in _reasons(each, found.get(each.stage), phase)
    ]
    if phase and not reasons:
        known = ", ".join(each.phase for each in planned[0].phases)
        raise CostError(f"plan explain {asked}: {phase} is not a phase of {stage}. Known: {known}.")
    prices = {name: aim.of(params, name).price for name in chosen}
    chosen_settings = {name: found[name] for name in chosen if name in found}
    return Explanation(
        asked or "the run",
        sum(each.seconds for each in reasons),
        sum(each.usd for each in reasons),
        max(each.peak_bytes for each in reasons)
        if phase
        else max(each.peak_bytes_per_gpu for each in planned),
        tuple(reasons),
        {role: dict(parts) for role, parts in planned[0].memory.items()} if stage else {},
        tuple(_effects(chosen_settings, prices, phase)),
    )


def _reasons(planned: StagePlan, setting: Setting | None, phase: str) -> list[PhaseReason]:
    works = {each.name: each.work for each in phases(setting)} if setting else {}
    return [
        PhaseReason(
            planned.stage,
            each.phase,
            each.seconds,
            each.usd,
            each.peak_bytes,
            each.bound,
            tuple(resources(works[each.phase], setting)) if setting else (),
        )
        for each in planned.phases
        if phase in ("", each.phase)
    ]


def resources(work: Work, setting: Setting) -> list[Resource]:
    """Resources of `work` on one device, each with its time in isolation."""
    bandwidth = setting.hardware.bandwidth_bytes_per_second * setting.efficiency.bandwidth
    rows: list[tuple[str, float, str, float, str, str]] = [
        ("matrix products", work.matmul_flops, "FLOP", work.matmul_flops / matmul_rate(setting),
         "2 x weights x tokens forward, twice that backward", "arXiv 2001.08361 section 2.1"),
        ("attention", work.attention_flops, "FLOP", attention_seconds(work, setting),
         "4 x width x tokens^2 a layer and sequence", "arXiv 2205.05198 appendix A"),
        ("reading weights", work.weight_bytes, "B", work.weight_bytes / bandwidth,
         "bytes of the weights x passes", "arXiv 2211.05102 section 2"),
        ("memory traffic", work.bytes_moved, "B", work.bytes_moved / bandwidth,
         "norms, activations, logits, cache", "costs/formulas/counts.py"),
        ("unpacking weights", work.dequantised_bytes, "B", unpacking_seconds(work, setting),
         "quantised and 16-bit bytes x passes", "costs/formulas/counts.py"),
        ("launching", work.operations, "operations", launch_seconds(work, setting),
         "operations a layer x layers x passes", "costs/tables/engines.py"),
        ("collectives", work.communicated_bytes, "B", sent_seconds(work, setting),
         "weights and gradients x (n - 1) / n", "arXiv 1910.02054 section 7"),
        ("host memory", work.paged_bytes, "B", paging_seconds(work, setting),
         "offloaded gradients, weights, states", "arXiv 2101.06840 section 4"),
    ]  # fmt: skip
    measured = setting.hardware.measured is not None
    return [
        Resource(name, amount, unit, None if measured else seconds, formula, source)
        for name, amount, unit, seconds, formula, source in rows
        if amount
    ]


# ---------------------------------------------------------------- effect of inputs


@dataclass(frozen=True)
class Input:
    """A number that a user can look up or change."""

    name: str
    unit: str
    source: str
    value: Callable[[Setting], float]
    more: Callable[[Setting, float], Setting]


def _of(name: str, unit: str, source: str, part: str, key: str) -> Input:
    """An input that is one field of a part of a Setting."""

    def more(setting: Setting, factor: float) -> Setting:
        held = getattr(setting, part)
        return replace(setting, **{part: replace(held, **{key: getattr(held, key) * factor})})

    return Input(name, unit, source, lambda s: getattr(getattr(s, part), key, 0.0), more)


def _longer(setting: Setting, factor: float) -> Setting:
    """Longer responses where the stage generates, longer sequences where it does not."""
    work = setting.workload
    if not work.response_tokens:
        return replace(
            setting,
            workload=replace(
                work,
                max_tokens=work.max_tokens * factor,  # type: ignore[arg-type]
                mean_tokens=work.mean_tokens * factor,
            ),
        )
    mean = work.response_mean
    return replace(
        setting,
        workload=replace(
            work,
            response_tokens=work.response_tokens * factor,  # type: ignore[arg-type]
            mean_response_tokens=mean * factor,
            max_tokens=work.max_tokens + work.response_tokens * (factor - 1),  # type: ignore[arg-type]
            mean_tokens=work.mean_tokens + mean * (factor - 1),
        ),
    )


def _more_responses(setting: Setting, factor: float) -> Setting:
    assert setting.rlhf is not None
    return replace(setting, rlhf=replace(setting.rlhf, batch=setting.rlhf.batch * factor))  # type: ignore[arg-type]


def _more_words(setting: Setting, factor: float) -> Setting:
    vocab = round(setting.model.vocab * factor)
    return replace(setting, model=replace(setting.model, vocab=vocab))


def _faster_products(setting: Setting, factor: float) -> Setting:
    rates = tuple((t, rate * factor) for t, rate in setting.hardware.peak_flops_per_second)
    return replace(setting, hardware=replace(setting.hardware, peak_flops_per_second=rates))


INPUTS: tuple[Input, ...] = (
    Input("longest response or sequence", "tokens", "params.yaml and the data",
          lambda s: s.workload.response_tokens or s.workload.max_tokens, _longer),
    _of("optimizer steps or updates", "", "params.yaml and the data", "workload", "steps"),
    Input("responses of a rollout", "", "batch_size", lambda s: s.rlhf.batch if s.rlhf else 0.0,
          _more_responses),
    _of("held-out sequences", "", "the data", "workload", "held_out"),
    _of("layers of the model", "", "config.json", "model", "layers"),
    Input("vocabulary", "", "config.json", lambda s: s.model.vocab, _more_words),
    Input("peak of matrix products", "FLOP/s", "costs/tables/hardware.yaml",
          lambda s: s.hardware.peak(s.levers.dtype), _faster_products),
    _of("bandwidth of the device", "B/s", "costs/tables/hardware.yaml", "hardware",
        "bandwidth_bytes_per_second"),
    _of("link between devices", "B/s", "costs/tables/hardware.yaml", "hardware",
        "link_bytes_per_second"),
    _of("network between nodes", "B/s", "costs/tables/hardware.yaml", "hardware",
        "network_bytes_per_second"),
    _of("launching an operation", "s", "costs/tables/engines.py", "engine", "op_seconds"),
    _of("starting a process", "s", "costs/tables/engines.py", "engine", "start_seconds"),
)  # fmt: skip
"""What users ask for; micro-batches and numbers of devices go in whole steps."""


def _effects(found: dict[str, Setting], prices: dict[str, Price], phase: str) -> list[Effect]:
    """The inputs that change anything, the largest change first."""
    if not found:
        return []
    before = _needs(found, prices, phase)
    effects = []
    for each in INPUTS:
        known = {name: setting for name, setting in found.items() if each.value(setting)}
        if not known:
            continue
        raised = found | {name: each.more(setting, MORE) for name, setting in known.items()}
        effects.append((each, each.value(next(iter(known.values()))),
                        _needs(raised, prices, phase)))  # fmt: skip
    made = [
        Effect(
            each.name,
            value,
            each.unit,
            each.source,
            *(after / was - 1 if was else 0.0 for after, was in zip(needs, before, strict=True)),
        )
        for each, value, needs in effects
    ]
    one = next(iter(prices.values()))
    made.append(Effect("price", one.expected, "USD/h", one.source, 0.0, 0.0, MORE - 1))
    telling = [each for each in made if _size(each) >= TELLING]
    return sorted(telling, key=_size, reverse=True)


def _size(effect: Effect) -> float:
    return max(abs(effect.memory), abs(effect.time), abs(effect.usd))


def _needs(
    found: dict[str, Setting], prices: dict[str, Price], phase: str
) -> tuple[float, float, float]:
    """(peak bytes, seconds, US dollars) of the stages, or of one phase of the only one."""
    made = [plan_stage(setting, prices[name], find_lever=False) for name, setting in found.items()]
    if phase:
        parts = [each for each in made[0].phases if each.phase == phase]
        return parts[0].peak_bytes, parts[0].seconds, parts[0].usd
    return (
        max(each.peak_bytes_per_gpu for each in made),
        sum(each.seconds for each in made),
        sum(each.usd.expected for each in made),
    )
