"""The rows that a stage process writes and its parent reads, one JSON object a line.

runs/<stage>/metrics.jsonl   MetricRow    training metrics, one row per logging step
runs/<stage>/usage.jsonl     UsageRow     what a step cost, one row per step and phase
runs/<stage>/attempts.jsonl  AttemptRow   when a process of this stage began and how it ended
runs/pipeline.jsonl          PipelineRow  which stages a pipeline run requested, and which it found
                             unchanged

Rows are appended in one write and flushed, so they survive kill -9; the reader skips and counts incomplete rows.
`run_id` names the pipeline run that paid for the row. An attempt is one process: its number grows by one at every
start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from config.methods.registry import METHODS, SAMPLING_METHODS
from config.names import inner_name

LOOPS = (*SAMPLING_METHODS, "distill")
"""Stages that sample responses as they train, update by update."""

STAGES = ("data", "sft", "reward", *METHODS, "distill", "evaluate")
"""Every stage, in order. One name everywhere: params section, DVC stage, module, runs/ folder, test file."""

RUN_ID_VARIABLE = "RLHF_RUN_ID"
"""Environment variable with the pipeline run's id, for the stage process."""

PIPELINE_VARIABLE = "RLHF_PIPELINE"
"""Environment variable with `pid:created` (config/alive.py) of the process that follows a stage and its budget."""

LAUNCHER_VARIABLE = "RLHF_LAUNCHER_PID"
"""Environment variable with the process id of the launcher of a stage's several processes; it forwards signals to all
of them.
"""

FAULTS_VARIABLE = "RLHF_FAULTS"
"""Folder in which each process of a stage writes its error line, in a file named by its rank; the launcher prints
it.
"""
FAULT_SUFFIX = ".fault"
NODES_APART_VARIABLE = "RLHF_NODES_APART"
"""Set for processes on several machines that share no folder."""
RENDEZVOUS_VARIABLE = "RLHF_RENDEZVOUS"
"""Environment variable with the file for the rendezvous of a stage's several processes."""

USD_LEFT_VARIABLE = "RLHF_USD_LEFT"
"""Environment variable with the US dollars that the budgets leave to a stage, for what it pays to others."""

USD_PER_SECOND_VARIABLE = "RLHF_USD_PER_SECOND"
"""Environment variable with the price of a stage's devices, for budget.min_gain_per_usd."""

CHANGED_CODE_VARIABLE = "RLHF_CHANGED_CODE"
"""Environment variable that decides what a stage does with a checkpoint of other code: CONTINUE or RESTART."""

CONTINUE, RESTART = "continue", "restart"
"""Resume from a checkpoint of other code, or start again."""

SUMMARY, PICTURE = "summary.md", "key.svg"
"""A run in a few lines of markdown, and the picture they embed: in runs/pipeline/<run_id>/."""

NO_RUN_ID = "manual"
"""The run id of a stage started by hand."""


def kept_folder(root: Path, run_id: str) -> Path:
    """Where a pipeline run keeps its own copies: params.yaml, dvc.lock, metrics, samples, plan, report."""
    return root / "runs" / "pipeline" / inner_name(run_id, "run id")


def stages_of(method: str, distills: bool = False) -> tuple[str, ...]:
    """The stages of a run that aligns with `method`, in order."""
    absent = {*METHODS, *(() if distills else ("distill",))} - {method}
    return tuple(stage for stage in STAGES if stage not in absent)


def final_stage(content: Mapping[str, Any]) -> str:
    """The stage whose model is registered, promoted, exported and served, from the raw content of params.yaml,
    possibly of an earlier schema.
    """
    student = content.get("tracking", {}).get("model") == "student"
    return "distill" if student else str(content["align"]["method"])


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True, ser_json_inf_nan="strings")
    """NaN and Infinity are written as JSON strings: JSON has no such numbers, and a row with one must not be lost."""


class UsageRow(Record):
    """Resources of one phase of one step. Phases of one attempt do not overlap, and add up to its wall time."""

    time: float
    """Seconds since the epoch when the phase ended."""
    run_id: str
    attempt: int
    step: int
    phase: str
    """`start` (imports, loading), then the stage's own phases, `save`, `end`; in the loop of training/ppo.py: rollout,
    score, reference, ...
    """
    seconds: float
    tokens: int
    """Real tokens processed, padding not counted."""
    sequences: int
    peak_bytes: int
    """Peak memory of the process so far: allocator peak on an accelerator, resident set on CPU."""
    device: str
    """`cpu` or the accelerator's name."""
    world_size: int
    usd: float = 0.0
    """Paid beside the devices' time, in US dollars: to an endpoint that judges."""


class MetricRow(Record):
    time: float
    run_id: str
    attempt: int
    step: int
    values: dict[str, float]


class AttemptRow(Record):
    time: float
    run_id: str
    attempt: int
    event: Literal["start", "resume", "retry", "end", "lost"]
    """`resume` follows `start` when a checkpoint was found; `step` is where it goes on from. `retry`: out of memory; a
    step is repeated with the smaller micro-batch in `message`. `lost` is written by the parent when it finds the
    process dead without an `end`: its time was paid for.
    """
    fingerprint: str
    """Digest of the stage's parameters and inputs; empty until it is known."""
    pid: int
    step: int
    exit_code: int | None = None
    message: str = ""
    lost_seconds: float = 0.0
    """Seconds lost by a `retry`."""
    lived_seconds: float | None = None
    """Seconds from creation to the last sign of life of a `lost` process, by a monotonic clock; None if no process of
    its machine observed it.
    """
    device: str = ""
    world_size: int = 1


class TimedRow(Record):
    """What a phase of a stage took on this machine: .rlhf/timed.jsonl, see config/workspace/timed.py."""

    time: float
    run_id: str
    """Empty for `rlhf calibrate`, whose stages run for a few steps."""
    machine: str
    """Processor and number of cores, so that a copied file is not taken for this machine's."""
    hardware: str
    """The device, as the planner names it."""
    stage: str
    held: str
    """Model, levers and processes that the stage ran with, but for the micro-batch: see costs/planning/machine.py."""
    micro_batch: Annotated[float, Field(gt=0)]
    phase: str
    units: Annotated[float, Field(gt=0)]
    """What the phase did, in its unit (config/work.py, PHASE_UNITS), as planned."""
    seconds: Annotated[float, Field(gt=0)]
    """Time of the work that produced the outputs, without repeated work."""
    peak_bytes: float
    taught_nothing: float = 0.0
    """Share of the stage's cost for responses that were all scored alike."""


class PipelineRow(Record):
    time: float
    run_id: str
    event: Literal["start", "stage", "end", "left"]
    """`left`: the report is written and the results are sent."""
    stage: str = ""
    cached: bool = False
    """DVC found the outputs valid: no process was started."""
    attempt: int | None = None
    """The attempt whose outputs the run uses; for a cached stage the one that made them."""
    state: str = ""
    """At `end`: completed, failed, stopped, over_budget, killed."""
    detail: dict[str, Any] = {}
