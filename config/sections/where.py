"""Where each stage runs: its pool, its nodes and processes, and what they shard."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from config.errors import ParamsError
from config.records import STAGES
from config.sections.base import Positive, Section, Sparse

LOCAL = "local"
"""The pool of stages that run in the pipeline's own machine."""
SINGLE_STAGES = ("data", "evaluate")
"""Stages that are always one process."""
SHARED_STAGES = tuple(stage for stage in STAGES if stage not in SINGLE_STAGES)
"""Stages that may run as several processes."""
DEFAULT = "default"
ONE_PROCESS = {"nodes": 1, "processes": 1, "sharding": "none", "offload": False}
"""Place settings of SINGLE_STAGES."""

Pool = Annotated[str, Field(min_length=1)]


def _present(value: Any) -> Any:
    if value == "zero1":
        raise PydanticCustomError("gone", "is gone; write zero2, which holds less in each process, or none for fp16")
    return value


Level = Annotated[Literal["none", "zero2", "zero3"], BeforeValidator(_present)]
WEIGHTS_DIVIDED = ("zero2", "zero3")


def can_be_divided(sharding: str, optimizer: str, quantisation: str | None) -> bool:
    """Whether `sharding` can divide a stage's states: 8-bit moments and packed 4-bit weights cannot be split."""
    return sharding not in WEIGHTS_DIVIDED or (optimizer != "adamw8bit" and quantisation is None)


class Place(Section):
    """Where stages run by default."""

    pool: Pool = Field(
        description="local runs it beside the pipeline; any other name on nodes of the Ray cluster at RAY_ADDRESS "
        "that were started with --labels pool=NAME."
    )
    nodes: Positive = Field(description="Nodes of a Ray cluster that share the stage's processes; 1 elsewhere.")
    processes: Positive = Field(
        description="Processes that share the stage's work, over all nodes: one per GPU, or several on a CPU. Must "
        "divide the batch_size of sft, reward and dpo. data and evaluate are always one process."
    )
    sharding: Level = Field(
        description="What the processes divide beside the work, to hold larger models. none: each process holds all. "
        "zero2: the optimizer's state and gradients are divided, and weights between two steps. zero3: "
        "also weights in use, which are gathered layer by layer (FSDP2). "
        "A loop that samples divides all its models; one that is sampling is whole meanwhile."
    )
    offload: bool = Field(
        description="zero2 and zero3: sharded weights, gradients and optimizer state are kept in "
        "the host's memory; slower. No effect on a CPU."
    )


class PlaceOverride(Sparse):
    """Overrides for a stage; absent keys are as in where.default."""

    pool: Pool | None = Field(None, description="As where.default.pool.")
    nodes: Positive | None = Field(None, description="As where.default.nodes.")
    processes: Positive | None = Field(None, description="As where.default.processes.")
    sharding: Level | None = Field(None, description="As where.default.sharding.")
    offload: bool | None = Field(None, description="As where.default.offload.")


OVERRIDE = "What is different for this stage; may be absent."


class _Default(Sparse):
    default: Place = Field(description="Every stage that says nothing else.")


if TYPE_CHECKING:
    _WithStages = _Default
else:
    _WithStages = create_model(
        "_WithStages",
        __base__=_Default,
        **{stage: (PlaceOverride | None, Field(None, description=OVERRIDE)) for stage in STAGES},
    )


class Where(_WithStages):
    """Where each stage runs. Results are the same up to rounding, so changing it retrains nothing."""

    def of(self, stage: str) -> Place:
        """Where `stage` runs: its overrides on top of the default."""
        base = ONE_PROCESS if stage in SINGLE_STAGES else {}
        return self.default.model_copy(update={**base, **self._overrides(stage)})

    def key(self, stage: str, name: str) -> str:
        """`where.ppo.processes`, or `where.default.processes` if the stage does not override it."""
        return f"where.{stage if name in self._overrides(stage) else DEFAULT}.{name}"

    def key_and_value(self, stage: str, name: str) -> str:
        """Key and value, for a message: `where.default.processes=8`."""
        return f"{self.key(stage, name)}={getattr(self.of(stage), name)}"

    def _overrides(self, stage: str) -> dict[str, Any]:
        override: PlaceOverride | None = getattr(self, stage)
        return override.model_dump() if override is not None else {}

    @field_validator(*STAGES)
    @classmethod
    def _says_something(cls, override: PlaceOverride | None) -> PlaceOverride | None:
        return override if override is not None and override.model_dump() else None

    @model_validator(mode="after")
    def _single_stages(self) -> "Where":
        for stage in SINGLE_STAGES:
            for name, only in ONE_PROCESS.items():
                value = self._overrides(stage).get(name, only)
                if value != only:
                    raise ParamsError(
                        f"where.{stage}.{name}={_written(value)}, and stage {stage} is always one "
                        f"process. Remove where.{stage}.{name} from params.yaml."
                    )
        return self

    @model_validator(mode="after")
    def _nodes_divide_the_processes(self) -> "Where":
        for stage in STAGES:
            place = self.of(stage)
            if place.nodes > 1 and place.pool == LOCAL:
                raise ParamsError(
                    f"{self.key_and_value(stage, 'nodes')}, and {self.key(stage, 'pool')}: local is this machine. "
                    "Name a pool of the cluster, or set nodes: 1 in params.yaml."
                )
            if place.processes % place.nodes:
                raise ParamsError(
                    f"{self.key_and_value(stage, 'processes')} does not divide over "
                    f"{self.key_and_value(stage, 'nodes')}. Change either in params.yaml."
                )
        return self

    @model_validator(mode="after")
    def _offloads_something(self) -> "Where":
        for key, divided in self._offloads():
            if not divided:
                raise ParamsError(
                    f"{key}=true moves sharded weights to the host, and nothing is sharded. "
                    f"Set {key.replace('offload', 'sharding')} to zero2 or zero3, or {key}: false in params.yaml."
                )
        return self

    def _offloads(self) -> Iterator[tuple[str, bool]]:
        """Each key that sets offload, and whether a stage it applies to is sharded."""
        divides = {stage: self.of(stage).sharding in WEIGHTS_DIVIDED for stage in SHARED_STAGES}
        if self.default.offload:
            yield "where.default.offload", any(divides.values())
        for stage in SHARED_STAGES:
            if self._overrides(stage).get("offload"):
                yield f"where.{stage}.offload", divides[stage]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
