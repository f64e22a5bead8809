"""Every stage, method, layout, adapter and rollout engine on this machine's accelerator: which end well, in what time
and memory; and how fast training and sampling are at real sizes.

    python -m benchmarks.gpu_report            # what is not measured yet, within 8 minutes
    python -m benchmarks.gpu_report --parts matrix --cpu --json

A cell is a stage process on a small model with other params. Cells that ended well are kept under --work and not run
again, so the command resumes where its time was up. Without an accelerator it exits with 2; with --cpu it runs the
matrix on the CPU, whose figures belong beside the others. The memory that the plan of a cell says is compared with
what the allocator held, also on the device of the tests that only pretends to be an accelerator and counts every byte:

    PYTHONPATH=$PWD/tests/pretend/hook python -m benchmarks.gpu_report --parts matrix
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.projects.checkouts import ROOT
from config import jsonl
from config.compose import compose
from config.load import load, read, validate, write
from config.methods.registry import RECORDS, stage_module
from config.records import MetricRow, UsageRow
from config.sections.where import SHARED_STAGES
from costs.formulas.memory import phase_of, phase_peak
from costs.planning.moments import moments
from costs.planning.settings import settings
from costs.planning.target import find_target
from training.modeling.tokenizer import load_tokenizer
from training.process.device import device, device_name

TINY = ROOT / "tests" / "e2e" / "tiny.yaml"
SPEED = ROOT / "recipes" / "demo.yaml"
LORA = "{rank: 8, alpha: 16.0, modules: [q, k, v, o, gate, up, down], dropout: 0.0}"
DISTILL = (
    "{student: {path: null, revision: null, layers: null, random: {family: qwen3, width: 32, layers: 1, heads: 2, "
    "kv_heads: 2, mlp_width: 64, tie_embeddings: true, rope_theta: 10000.0}}, lora: null, optimizer: adamw, "
    "activation_checkpointing: false, updates: 6, batch_size: 16, responses_per_prompt: 1, max_new_tokens: 12, "
    "temperature: 1.0, rollout_batch_size: 16, rollout_engine: static, num_mini_batches: 2, micro_batch_tokens: "
    "4096, learning_rate: 1.0e-3, schedule: constant, max_grad_norm: 1.0, checkpoint_every_updates: 2, "
    "sample_every_updates: 2, sft_updates: 2, lmbda: 0.5, beta: 0.0, distill_epochs: 1}"
)
VOCABULARY = 151_936
"""Entries of Qwen2.5's embedding."""
SHAPES = {
    "0.5B": {"width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp_width": 4864},
    "1.5B": {"width": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "mlp_width": 8960},
}
"""Of Qwen2.5, with tied embeddings."""
CELL_SECONDS = 240.0
PLANNED_FOR = "h100-sxm"
"""Any accelerator has the same need, except for the chunk of the output head."""


class Cell(NamedTuple):
    """One stage process. It finds the data and models of its `base` where it runs."""

    name: str
    stage: str
    overrides: tuple[str, ...]
    base: str
    processes: int = 1
    aligned_by: str = ""
    """The cell whose aligned model it evaluates."""


class Outcome(NamedTuple):
    """How a cell ended."""

    cell: str
    device: str
    exit_code: int
    seconds: float
    """Of the process."""
    peak_bytes: int
    phases: dict[str, dict[str, float]]
    """Seconds, tokens and peak bytes of each phase, without the first step, which warms up; and planned bytes, for the
    sequences that it had.
    """
    metrics: dict[str, float]
    """The last row."""
    said: str
    """The last lines of a cell that failed."""


ADAPTED = (
    "model.dtype=bf16",
    "model.random=null",
    "model.path=./base",
    *(f"{stage}.lora={LORA}" for stage in ("sft", "reward", "ppo", "rloo", "grpo", "dpo")),
)
WIDE = ("model.random.width=64",)
BASES = {
    "fp32": WIDE,
    "bf16": (*WIDE, "model.dtype=bf16"),
    "lora": ADAPTED,
    "nf4": (*ADAPTED, "model.quantisation=nf4"),
}
"""Those with adapters adapt the SFT model of fp32."""
BASE_STAGES = ("data", "sft", "reward")
"""Run in the folder of their base; the other stages start from what they made."""


def matrix() -> tuple[list[Cell], list[Cell]]:
    """The stages that others start from, in order; and those that start from them."""
    first = [
        Cell(f"{base} {stage}", stage, overrides, base) for base, overrides in BASES.items() for stage in BASE_STAGES
    ]
    then = []
    for base, overrides in BASES.items():
        adapted = base in ("lora", "nf4")

        def cell(
            name: str, stage: str, *more: str, base: str = base, on: tuple[str, ...] = overrides, processes: int = 1
        ) -> Cell:
            method = (f"align.method={stage}",) if stage in ("rloo", "grpo", "dpo") else ()
            full = f"{base} {stage} {name}".strip()
            return Cell(full, stage, (*on, *method, *more), base, processes=processes)

        layouts = ("separate", "shared_base") if adapted else ("separate", "shared_trunk")
        for layout in layouts:
            engines = ("static",) if layout == "shared_trunk" else ("static", "paged")
            then += [
                cell(f"{layout} {engine}", "ppo", f"ppo.layout={layout}", f"ppo.rollout_engine={engine}")
                for engine in engines
            ]
        then += [cell("", "rloo"), cell("paged", "rloo", "rloo.rollout_engine=paged")]
        then += [cell("", "grpo"), cell("", "dpo")]
        if not adapted:
            distilled = cell("", "distill", f"distill={DISTILL}")
            then.append(distilled._replace(aligned_by=f"{base} ppo separate static"))
            then += [
                cell("adamw8bit", "ppo", "ppo.optimizer=adamw8bit"),
                cell("checkpointed", "ppo", "ppo.activation_checkpointing=true"),
                cell("recomputed", "ppo", "ppo.recompute_logprobs=true"),
            ]
        if base == "fp32":
            then.append(cell("2 processes", "ppo", processes=2))
    then += [
        Cell(f"{base} evaluate", "evaluate", BASES[base], base, aligned_by=f"{base} ppo {layout} static")
        for base, layout in (("fp32", "separate"), ("bf16", "separate"), ("lora", "shared_base"))
    ]
    return first, then


class Bench:
    """Runs cells under a folder and keeps what they said."""

    def __init__(self, work: Path, cpu: bool, until: float) -> None:
        self.work, self.until = work, until
        self.device = "cpu" if cpu else device_name(device())
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(ROOT), os.environ.get("PYTHONPATH", "")]
        ), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"} | (
            {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
        )  # fmt: skip
        self.kept = work / "cells.jsonl"
        self.outcomes: dict[str, Outcome] = {}
        if self.kept.exists():
            for line in self.kept.read_text(encoding="utf-8").splitlines():
                outcome = Outcome(**json.loads(line))
                self.outcomes[outcome.cell] = outcome

    def in_order(self, cells: Sequence[Cell], recipe: Path = TINY) -> None:
        for cell in cells:
            self.run(cell, recipe)

    def run(self, cell: Cell, recipe: Path = TINY) -> None:
        """Unless it ended well before, or no time is left."""
        earlier = self.outcomes.get(cell.name)
        remaining = self.until - time.monotonic()
        if (earlier is not None and earlier.exit_code == 0) or remaining < 20:
            return
        base = self.work / cell.base.replace(" ", "-")
        folder = base
        if cell.stage not in BASE_STAGES:
            folder = self.work / "cells" / cell.name.replace(" ", "-")
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "models").mkdir(parents=True)
            for part in ("data", "models/sft", "models/reward", "base"):
                if (base / part).exists():
                    (folder / part).symlink_to(base / part)
        if cell.aligned_by:
            aligned = self.work / "cells" / cell.aligned_by.replace(" ", "-") / "models" / "ppo"
            (folder / "models" / "ppo").symlink_to(aligned)
        folder.mkdir(parents=True, exist_ok=True)
        write(validate(compose(read(recipe), {}, list(cell.overrides)), cell.name), folder / "params.yaml")
        command = [stage_module(cell.stage)]
        if cell.stage in SHARED_STAGES:
            command = ["training.process.launch", cell.stage, "--processes", str(cell.processes)]
        begun = time.monotonic()
        with (folder / "said").open("w", encoding="utf-8") as said:
            try:
                code = subprocess.run(
                    [sys.executable, "-m", *command],
                    cwd=folder, env=self.environment, stdout=said, stderr=said,
                    timeout=min(CELL_SECONDS, remaining), check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
        lines = (folder / "said").read_text(errors="replace").strip().splitlines()
        outcome = Outcome(
            cell.name, self.device, code, time.monotonic() - begun,
            *figures(folder, cell.stage), " | ".join(lines[-3:])[-600:] if code else "",
        )  # fmt: skip
        self.outcomes[cell.name] = outcome
        with self.kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


def figures(folder: Path, stage: str) -> tuple[int, dict[str, dict[str, float]], dict[str, float]]:
    """Peak bytes, phases and last metrics of a stage's streams."""
    streams = folder / "runs" / stage
    usage = jsonl.read(streams / "usage.jsonl", UsageRow).rows
    rows = jsonl.read(streams / "metrics.jsonl", MetricRow).rows
    phases: dict[str, dict[str, float]] = {}
    warm = min((row.step for row in usage if row.tokens), default=0)
    for row in usage:
        if row.step > warm and row.phase not in ("start", "save", "end"):
            phase = phases.setdefault(row.phase, {"seconds": 0.0, "tokens": 0, "peak_bytes": 0})
            phase["seconds"] += row.seconds
            phase["tokens"] += row.tokens
            phase["peak_bytes"] = max(phase["peak_bytes"], row.peak_bytes)
    if stage in RECORDS and max((row.world_size for row in usage), default=1) == 1:
        for name, planned in planned_bytes(folder, stage, usage).items():
            if name in phases:
                phases[name]["planned_bytes"] = planned
    return (max((row.peak_bytes for row in usage), default=0), phases, dict(rows[-1].values) if rows else {})


def planned_bytes(folder: Path, stage: str, usage: Sequence[UsageRow]) -> dict[str, float]:
    """The plan's peak of each phase of an alignment stage, for sequences as long as those were."""
    params = load(folder / "params.yaml")
    setting = settings(params, find_target(params, PLANNED_FOR, None, None, folder))[stage]
    rolled = [row for row in usage if row.phase == "rollout" and row.sequences]
    if rolled:
        mean = sum(row.tokens for row in rolled) / sum(row.sequences for row in rolled)
        work = setting.workload
        longer = replace(
            work, max_tokens=round(mean), mean_tokens=mean, mean_response_tokens=max(1.0, mean - work.prompt_tokens)
        )
        setting = replace(setting, workload=longer)
    held = moments(setting)
    return {phase: phase_peak(held, phase) for phase in dict.fromkeys(map(phase_of, held))}


def save_base(prepared: Path, shape: str, folder: Path) -> None:
    """A model of a real size with random weights in bf16, and the tokenizer of `prepared`."""
    sizes = SHAPES[shape]
    tokenizer = load_tokenizer(prepared / "data" / "tokenizer")
    torch.manual_seed(1)
    with device():
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(
                vocab_size=VOCABULARY, hidden_size=sizes["width"],
                num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
                num_key_value_heads=sizes["kv_heads"], intermediate_size=sizes["mlp_width"],
                tie_word_embeddings=True, max_position_embeddings=4096,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            ), dtype=torch.bfloat16,
        )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def speed_cells(shape: str, batch: int, new_tokens: int) -> list[Cell]:
    """Training and sampling at a real size in bf16."""
    base = f"speed {shape}"
    common = (
        "model.random=null", "model.path=./base", "model.dtype=bf16", "model.context_length=512",
        "data.source.preference_rows=4000", "data.source.sft_rows=4000",
        "data.source.prompt_rows=2000", "reward.init=sft",
        *(f"{stage}.{setting}" for stage in ("sft", "reward") for setting in (
            "max_steps=12", "batch_size=64", "micro_batch_size=64", "max_length=96",
            "log_every_steps=1", "checkpoint_every_steps=1000", "learning_rate=1.0e-5")),
        f"ppo.max_new_tokens={new_tokens}", f"ppo.batch_size={batch}",
        f"ppo.rollout_batch_size={batch}", "ppo.updates=4", "ppo.ppo_epochs=1",
        "ppo.num_mini_batches=4", "ppo.micro_batch_tokens=16384",
        "ppo.checkpoint_every_updates=1000", "ppo.learning_rate=1.0e-6",
        "ppo.value_learning_rate=1.0e-6", "ppo.max_kl=null", "ppo.target_kl=null",
        "evaluate.max_new_tokens=64",
    )  # fmt: skip
    cells = [Cell(f"{base} {stage}", stage, common, base) for stage in BASE_STAGES]
    return cells + [
        Cell(f"{base} ppo {engine}", "ppo", (*common, f"ppo.rollout_engine={engine}"), base)
        for engine in ("static", "paged")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("matrix", "speed"), default=["matrix", "speed"])
    parser.add_argument("--cells", default="", help="only those whose name has this in it")
    parser.add_argument("--minutes", type=float, default=8.0, help="to stop after (default 8)")
    parser.add_argument("--together", type=int, default=6, help="cells at a time (default 6)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", type=int, default=128, help="episodes of a PPO update")
    parser.add_argument("--new-tokens", type=int, default=256, help="of a response of PPO")
    parser.add_argument("--cpu", action="store_true", help="the matrix, on the CPU")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "gpu")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parse_args()
    if not (options.cpu or torch.accelerator.is_available()):
        print("No accelerator here: torch sees the CPU alone. --cpu runs the matrix on it.", file=sys.stderr)
        sys.exit(2)
    options.work = options.work.resolve()  # links lead there
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.work, options.cpu, time.monotonic() + 60 * options.minutes)
    if "matrix" in options.parts:
        first, then = matrix()
        with ThreadPoolExecutor(options.together) as pool:
            chains = [[cell for cell in first if cell.base == base] for base in BASES]
            bench.in_order(chains[0])
            for name in ("lora", "nf4"):
                (options.work / name).mkdir(exist_ok=True)
                if not (options.work / name / "base").exists():
                    (options.work / name / "base").symlink_to("../fp32/models/sft")
            list(pool.map(bench.in_order, chains[1:]))
            chosen = [cell for cell in then if options.cells in cell.name]
            list(pool.map(bench.run, [cell for cell in chosen if not cell.aligned_by]))
            list(pool.map(bench.run, [cell for cell in chosen if cell.aligned_by]))
    if "speed" in options.parts and not options.cpu:
        bench.run(Cell("speed data", "data", (), "speed"), SPEED)
        for shape in options.shapes:
            folder = options.work / f"speed-{shape}" / "base"
            if not (folder / "config.json").exists():
                save_base(options.work / "speed", shape, folder)
            bench.in_order(speed_cells(shape, options.batch, options.new_tokens), SPEED)
    show(list(bench.outcomes.values()), options.json)


def show(outcomes: Sequence[Outcome], as_json: bool) -> None:
    if as_json:
        print(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
        return
    table = Table("cell", "exit", "seconds", "peak MiB", "tokens a second by phase", "planned / held memory", box=None)
    errors = []
    for outcome in sorted(outcomes):
        rates: list[Any] = [
            f"{name} {phase['tokens'] / phase['seconds']:,.0f}"
            for name, phase in outcome.phases.items()
            if phase["tokens"] and phase["seconds"]
        ]
        ratios = {
            name: phase["planned_bytes"] / phase["peak_bytes"]
            for name, phase in outcome.phases.items()
            if phase.get("planned_bytes") and phase["peak_bytes"] and outcome.device != "cpu"
        }
        errors += [abs(ratio - 1) for ratio in ratios.values()]
        table.add_row(
            outcome.cell,
            str(outcome.exit_code),
            f"{outcome.seconds:.1f}",
            f"{outcome.peak_bytes / 2**20:,.0f}",
            outcome.said or ", ".join(rates),
            ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
        )
    Console(width=200).print(table)
    if errors:
        print(f"Memory planned for {len(errors)} phases: {median(errors):.1%} off in the median, "
              f"{max(errors):.1%} at worst.")  # fmt: skip


if __name__ == "__main__":
    main()
