"""The type of a published measurement: what was run (`Run`) and what was measured (`Measured`).

A row states what its source prints and leaves out what it does not print; the planner's assumptions for what is left
out are part of its answer. docs/planning.md describes how to write one.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from benchmarks.published.engines import Software, engine
from config.errors import CostError
from costs.formulas.setting import Attention, Checkpointing, Optimizer, Tuning
from costs.tables.catalogue import Hardware, hardware, shape
from costs.tables.losses import LOSSES
from costs.tables.shapes import ModelShape, from_config

Stage = Literal["sft", "pretrain", "reward", "dpo", "ppo", "grpo", "rloo", "generate", "prefill", "load"]
Role = Literal["policy", "ref", "reward", "value", "engine"]
LOOPS = ("ppo", "grpo", "rloo")
GENERATING = ("generate", "prefill", "load")


class Refused(CostError):
    """A row that cannot be planned. The message names the key, the value and the rule."""


def _device(value: Any) -> Any:
    """A name of costs/tables/hardware.yaml; or `{name, watts}`, for a card with a power limit."""
    if isinstance(value, str):
        return _known(hardware, value)
    if isinstance(value, Mapping) and set(value) == {"name", "watts"}:
        return with_power_limit(_known(hardware, str(value["name"])), float(value["watts"]))
    return value


def with_power_limit(device: Hardware, watts: float) -> Hardware:
    """The device under a power limit. Clocks follow the cube root of the power: power grows with frequency times
    voltage squared, and voltage follows frequency.
    """
    share = min(1.0, watts / device.watts) ** (1 / 3)
    return replace(device, watts=watts, attainable=device.attainable * share)


def _model(value: Any) -> Any:
    """A name of costs/tables/shapes.yaml, or the fields of a `config.json`."""
    if isinstance(value, str):
        return _known(shape, value)
    return _known(lambda config: from_config(config, "model"), value) if isinstance(value, Mapping) else value


def _engine(value: Any) -> Any:
    return _known(engine, value) if isinstance(value, str) else value


def _known(find: Any, value: Any) -> Any:
    try:
        return find(value)
    except CostError as error:
        raise ValueError(str(error)) from None


Model = Annotated[ModelShape, BeforeValidator(_model)]
Device = Annotated[Hardware, BeforeValidator(_device)]
Facts = Annotated[Software, BeforeValidator(_engine)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Typed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class Run(Typed):
    """What was run. None: the source does not say."""

    stage: Stage
    model: Model
    engine: Facts | None = None
    released: Annotated[str, Field(pattern=r"^20\d\d-\d\d$")] | None = None
    """Month of the software, `2023-12`; None: the newest version."""
    device: Device | None = None
    gpus: Count | None = None
    gpus_per_node: Count = 8
    interconnect: Literal["nvlink", "pcie"] | None = None

    # numbers
    dtype: Literal["bf16", "fp16", "fp32", "tf32"] | None = None
    """Type of the matrix products."""
    fp8: bool = False
    """Matrix products in 8 bits, all else in `dtype`."""
    trained_weights: Literal["dtype", "fp32", "dtype_and_fp32"] | None = None
    """Weights that learn are held in `dtype` alone, in fp32 and cast for computing (autocast, Trainer's `bf16: true`),
    or in `dtype` with an fp32 copy in the optimizer (DeepSpeed, Megatron).
    """
    quantisation: Literal["nf4", "nf4-dq", "int8", "int4"] | None = None
    """Storage of frozen weights."""

    # training
    tuning: Tuning | None = None
    lora_rank: Count | None = None
    lora_modules: tuple[str, ...] | None = None
    lora_dropout: bool | None = None
    micro_batch: Count | None = None
    """Sequences of one forward pass on one device, both sequences of a pair counted; of a generation, sequences side
    by side.
    """
    global_batch: Positive | None = None
    """Sequences between two optimizer steps, over all devices."""
    accumulation: Count | None = None
    optimizer: Optimizer | None = None
    recomputation: Checkpointing | None = None
    attention: Attention | None = None
    loss: str | None = None
    """How the loss over the vocabulary is computed; None: as the engine does by itself."""
    compiled: bool | None = None
    cuda_graphs: bool = False
    fused_kernels: bool = False
    """Liger's norms and loss."""
    offload_optimizer: bool = False
    offload_weights: bool = False
    samples: Positive | None = None
    train_tokens: Positive | None = None
    steps: Positive | None = None
    epochs: Positive = 1.0

    # lengths, in tokens
    max_tokens: Count | None = None
    """Longest sequence of a batch."""
    mean_tokens: Positive | None = None
    """Tokens a sequence costs on average, padding included."""
    row_tokens: Positive | None = None
    """Mean length of the rows, without padding; a batch is padded to its longest."""
    packed: bool = False
    varied: bool = False
    """Whether the lengths of rows differ between batches."""
    prompt_tokens: Count | None = None
    response_tokens: Count | None = None
    mean_response_tokens: Positive | None = None

    # parallelism
    sharding: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    virtual_pipeline: Count = 1
    context_parallel: Count = 1

    # a loop of reinforcement learning
    value_model: Model | None = None
    reward_model: Model | None = None
    """None: as large as the policy under PPO, rules under GRPO and RLOO."""
    ref_model: bool = True
    """Of a loop and of DPO: whether a reference model is held and read."""
    ema: bool = False
    """A running average of the policy is held beside it."""
    rollout_batch: Count | None = None
    """Responses between two rollouts, over all devices."""
    mini_batch: Count | None = None
    """Responses between two optimizer steps, over all devices."""
    ppo_epochs: Count | None = None
    generation_batch: Count | None = None
    """Responses generated side by side on one device."""
    largest_batch: bool = False
    """The batch is the largest that fits."""
    max_global_batch: Count | None = None
    generator: Literal["training", "hybrid", "vllm"] | None = None
    """What generates: the training stack, DeepSpeed's hybrid engine, or a server."""
    roles: dict[Role, Count] | None = None
    """Role -> its own devices; None: every role on all devices, one after the other."""
    lag: Literal[0, 1] = 0
    """Rollouts that generation runs ahead of training."""

    @property
    def served(self) -> bool:
        """Whether a server generates the responses of a loop."""
        return self.generator == "vllm" or "engine" in (self.roles or {})

    @model_validator(mode="after")
    def _agree(self) -> "Run":
        for rule, broken in _RULES:
            if broken(self):
                raise ValueError(rule.format(run=self))
        return self


def _split(run: Run) -> int:
    return run.tensor_parallel * run.pipeline_parallel * run.context_parallel


_RULES: tuple[tuple[str, Any], ...] = (
    ("lora_rank={run.lora_rank} contradicts tuning=full. Leave one out.",
     lambda run: run.tuning == "full" and run.lora_rank),
    ("quantisation={run.quantisation} contradicts tuning=full: quantised weights are frozen. Leave one out.",
     lambda run: run.tuning == "full" and run.quantisation),
    ("gpus={run.gpus} does not split into tensor_parallel x pipeline_parallel x context_parallel. "
     "Change one of them.",
     lambda run: run.gpus and run.gpus % _split(run)),
    ("tensor_parallel={run.tensor_parallel} does not divide the {run.model.heads} attention heads "
     "of the model. Change either.",
     lambda run: run.model.heads % run.tensor_parallel),
    ("mean_tokens={run.mean_tokens} is above max_tokens={run.max_tokens}. Change either.",
     lambda run: run.mean_tokens and run.max_tokens and run.mean_tokens > run.max_tokens),
    ("mean_response_tokens={run.mean_response_tokens} is above response_tokens={run.response_tokens}. Change either.",
     lambda run: run.mean_response_tokens and run.response_tokens
     and run.mean_response_tokens > run.response_tokens),
    ("roles={run.roles} does not add up to gpus={run.gpus}. Change either.",
     lambda run: run.roles and sum(run.roles.values()) != run.gpus),
    ("loss={run.loss} is not one of " + ", ".join(LOSSES) + ".",
     lambda run: run.loss and run.loss not in LOSSES),
    ("pipeline_parallel and context_parallel of stage {run.stage} have no formula. Leave them out.",
     lambda run: run.stage not in ("sft", "pretrain", "reward", "dpo")
     and run.pipeline_parallel * run.context_parallel > 1),
    ("tensor_parallel of stage {run.stage} has no formula. Leave it out.",
     lambda run: run.stage in LOOPS and run.tensor_parallel > 1),
    ("fp8 of stage {run.stage} has no formula. Leave it out.",
     lambda run: run.fp8 and run.stage in (*LOOPS, *GENERATING)),
    ("dtype=bf16: {run.device.name} has no bf16 matrix products. Use fp16 or fp32.",
     lambda run: run.dtype == "bf16" and run.device
     and not dict(run.device.peak_flops_per_second).get("bf16")),
    ("a row of stage {run.stage} needs prompt_tokens and response_tokens: they decide memory and time.",
     lambda run: run.stage in LOOPS and not (run.prompt_tokens and run.response_tokens)),
    ("a row of stage {run.stage} needs max_tokens: it decides memory and time.",
     lambda run: run.stage in ("sft", "pretrain", "reward", "dpo") and not run.max_tokens),
    ("a row of stage {run.stage} needs micro_batch or global_batch: it decides memory and time.",
     lambda run: run.stage in ("sft", "pretrain", "reward", "dpo", "generate", "prefill")
     and not (run.micro_batch or run.global_batch)),
)  # fmt: skip
"""(message, whether a run breaks the rule), in the order they are checked."""

UNITS: dict[str, dict[str, float]] = {
    "memory": {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "MB": 1e6, "bytes": 1.0},
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0},
    "throughput": {"1/s": 1.0, "1/min": 1 / 60, "1/h": 1 / 3600, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "fits": {"": 1.0},
}
"""Quantity -> unit -> bytes, seconds, or items per second."""


class Measured(Typed):
    """One measured number."""

    quantity: Literal["memory", "time", "throughput", "fits"]
    value: float | bool | None = None
    """None: not published; planned all the same. Of `fits` true or false."""
    unit: str = ""
    per: Literal[
        "step", "micro_step", "sample", "pair", "token", "input_token", "any_token", "first_token", "job", "flop"
    ] = "step"
    """What a time is for, or what a throughput counts. `token` counts responses' tokens where something is generated,
    `any_token` those of the prompts too.
    """
    items: Positive = 1.0
    """How many of them the time is for."""
    each_gpu: bool = False
    """The throughput is that of one device."""
    all_gpus: bool = False
    """The memory is the sum over all devices; the time is device-time (GPU-hours)."""
    counts: Literal["tensors", "reserved", "driver"] | None = None
    """Memory of tensors (`max_memory_allocated`), of the allocator (`max_memory_reserved`), or what the driver counts
    (nvidia-smi). None: as the engine reports it.
    """
    weights_only: bool = False

    @model_validator(mode="after")
    def _unit_of_quantity(self) -> "Measured":
        units = UNITS[self.quantity]
        if self.unit not in units:
            raise ValueError(
                f"unit={self.unit!r} of quantity={self.quantity} is not one of "
                f"{', '.join(units)}{nearest(self.unit, units)}."
            )
        flag = isinstance(self.value, bool)
        if self.value is not None and (flag != (self.quantity == "fits") or not (flag or 0 < self.value < math.inf)):
            raise ValueError(
                f"value={self.value!r} of quantity={self.quantity} must be "
                + ("true or false." if self.quantity == "fits" else "a number above 0.")
            )
        if (self.per == "flop") != self.unit.endswith("FLOP/s"):
            raise ValueError(f"per={self.per!r} does not go with unit={self.unit!r}.")
        return self

    @property
    def scale(self) -> float:
        """Base units in one unit."""
        return UNITS[self.quantity][self.unit]


class Row(Typed):
    """One row of a table: a run and its measurements, the main one first."""

    id: str
    source: str
    tier: Literal["A", "B"] = "B"
    """A: the source states everything that decides. B: one or two facts are inferred."""
    run: Run
    measured: tuple[Measured, ...]
    notes: str | None = None

    @field_validator("measured")
    @classmethod
    def _at_least_one(cls, value: tuple[Measured, ...]) -> tuple[Measured, ...]:
        if not value:
            raise ValueError("measured is empty: a row has at least one measurement.")
        return value


_KEYS = {"": tuple(Row.model_fields), "run": tuple(Run.model_fields), "measured": tuple(Measured.model_fields)}


def read_row(content: Any) -> Row:
    """The typed row of YAML or JSON. Raises Refused with one line for each mistake."""
    if not isinstance(content, Mapping):
        raise Refused(f"a row is a mapping of {', '.join(_KEYS[''])}, not {content!r:.60}.")
    try:
        return Row.model_validate(_tuples(content), strict=True)
    except ValidationError as error:
        raise Refused("; ".join(dict.fromkeys(map(_line, error.errors())))) from None


def _tuples(value: Any) -> Any:
    """YAML has lists only; keys are text."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {str(k): _tuples(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _line(error: Mapping[str, Any]) -> str:
    """One mistake: its key, its value, the rule."""
    names = [item for item in error["loc"] if isinstance(item, str)]
    key = ".".join(map(str, error["loc"]))
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        keys = _KEYS.get(names[0] if len(names) > 1 else "", ())
        return f"{key} is not a key of a row{nearest(names[-1], keys)}."
    if error["type"] == "missing":
        return f"{key} is missing."
    if error["type"] == "value_error" and len(names) <= 1:
        return message
    if error["type"] == "literal_error":
        keys = tuple(part.strip("'\" ") for part in message.partition("should be ")[2]
                      .replace(" or ", ", ").split(","))  # fmt: skip
        return f"{key}={error['input']!r} is not one of {', '.join(keys)}" + (f"{nearest(str(error['input']), keys)}.")
    return f"{key}={error['input']!r}: {message[:1].lower()}{message[1:].removesuffix('.')}."


def nearest(word: str, known: Iterable[str]) -> str:
    """` (nearest: a)`, or nothing; case does not matter."""
    by_case = {item.lower(): item for item in known}
    close = [by_case[get_close_match] for get_close_match in difflib.get_close_matches(word.lower(), by_case, 1, 0.5)]
    return f" (nearest: {close[0]})" if close else ""
