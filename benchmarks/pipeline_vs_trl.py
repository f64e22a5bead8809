"""Our pipeline against the one that a user of TRL writes: SFT, reward model and RLOO on the same rows, with the same
tokenizer, settings and first weights, each stage a process.

    python -m benchmarks.pipeline_vs_trl --json
    python -m benchmarks.pipeline_vs_trl --set rloo.updates=4 --set reward.max_steps=100

Seconds are those of the processes, imports included; memory is the largest resident set of a stage (ours measures its
own: it resets the system's high-water mark in each phase).
Both policies answer the same held-out prompts with the same random numbers, for the gold score.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.projects.checkouts import ROOT
from benchmarks.projects.processes import stage_process
from benchmarks.trl_comparison.runs import gold_of
from config import jsonl
from config.load import load, write
from config.records import UsageRow
from config.schema import Params
from config.sections.offline import Optimisation
from training.modeling.models import base_model
from training.modeling.tokenizer import load_tokenizer

STAGES = ("sft", "reward", "rloo")


class Took(NamedTuple):
    seconds: float
    peak_mib: float
    """Largest resident set."""


def run(folder: Path, log: str, *command: str) -> Took:
    """Run a Python module in `folder`. Raises SystemExit with the log's last line if it fails."""
    print(log, file=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with (folder / f"{log}.log").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = Took(time.perf_counter() - began, used.ru_maxrss / 1024)
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"{log} failed: {said.read().strip().splitlines()[-1]}")
    return took


# ---------------------------------------------------------------- TRL's stages


def trl_stage(stage: str, folder: Path) -> None:
    """Train one stage with TRL's trainer as its documentation does, with our settings."""
    from datasets import load_dataset

    params = load(folder / "params.yaml")
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    dataset = {"sft": "sft", "reward": "preference", "rloo": "prompts"}[stage]
    rows = load_dataset(
        "json",
        data_files=str(folder / f"data/prepared/{dataset}/train.jsonl"),
        split="train",
        cache_dir=str(folder / "cache"),
    )
    out = str(folder / "trl" / stage)
    common = {"train_dataset": rows, "processing_class": tokenizer}
    if stage == "sft":
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**offline(params.sft, out), max_length=params.sft.max_length)
        trainer: Any = SFTTrainer(str(folder / "models/base"), config, **common)
    elif stage == "reward":
        from trl import RewardConfig, RewardTrainer

        settings = params.trained_reward
        assert settings is not None
        reward = RewardConfig(**offline(settings, out), max_length=settings.max_length)
        trainer = RewardTrainer(str(folder / "trl/sft"), reward, **common)
    else:
        from trl import RLOOConfig, RLOOTrainer

        trainer = RLOOTrainer(
            str(folder / "trl/sft"), str(folder / "trl/reward"), RLOOConfig(**online(params, out)), **common
        )
    trainer.train()
    trainer.save_model(out)
    tokenizer.save_pretrained(out)


def usual(out: str) -> dict[str, Any]:
    """What all stages have in common."""
    return {
        "output_dir": out,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def offline(settings: Optimisation, out: str) -> dict[str, Any]:
    return {
        **usual(out),
        "learning_rate": settings.learning_rate,
        "adam_beta2": settings.adam_beta2,
        "max_grad_norm": settings.max_grad_norm,
        "weight_decay": settings.weight_decay,
        "warmup_steps": settings.warmup_fraction,  # below 1 it is a share of all steps
        "lr_scheduler_type": settings.schedule,
        "per_device_train_batch_size": settings.batch_size,
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "logging_steps": settings.log_every_steps,
    }


def online(params: Params, out: str) -> dict[str, Any]:
    """RLOO's settings: an optimizer step for each mini-batch of each pass over a rollout."""
    settings = params.section("rloo")
    return {
        **usual(out),
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "lr_scheduler_type": settings.schedule,
        "per_device_train_batch_size": settings.batch_size // settings.num_mini_batches,
        "steps_per_generation": settings.num_mini_batches,
        "num_generations": settings.responses_per_prompt,
        "num_iterations": settings.rloo_epochs,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
        "beta": settings.kl.coef,
        "epsilon": settings.cliprange,
        "normalize_advantages": settings.normalise_advantages,
        "max_steps": settings.updates * settings.rloo_epochs * settings.num_mini_batches,
    }


# ---------------------------------------------------------------- both sides


def compare(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    params = load(ROOT / "recipes/demo.yaml", ["align.method=rloo", *overrides])
    write(params, folder / "params.yaml")
    stage_process(folder, "training.data", {})
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    base_model(params.model, tokenizer, params.seed).save_pretrained(folder / "models/base")
    ours: dict[str, Took] = {}
    trl: dict[str, Took] = {}
    for stage in STAGES:  # in turn: a busy neighbour hits both
        module = ("training.ppo", "rloo") if stage == "rloo" else (f"training.{stage}",)
        seconds = run(folder, stage, *module).seconds
        usage = jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows
        ours[stage] = Took(seconds, max(row.peak_bytes for row in usage) / 2**20)
        trl[stage] = run(folder, f"trl {stage}", "benchmarks.pipeline_vs_trl", "--stage", stage, str(folder))
    totals, peaks = (
        [sum(took.seconds for took in side.values()) for side in (ours, trl)],
        [max(took.peak_mib for took in side.values()) for side in (ours, trl)],
    )
    return {
        "seconds_ratio": totals[0] / totals[1],
        "memory_ratio": peaks[0] / peaks[1],
        "gold": gold_of(folder / "models/rloo", folder, params),
        "trl_gold": gold_of(folder / "trl/rloo", folder, params),
        "stages": {stage: {"ours": ours[stage]._asdict(), "trl": trl[stage]._asdict()} for stage in STAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.stage:
        trl_stage(options.stage, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), options.set)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for stage, sides in result["stages"].items():
        (our_seconds, our_mib), (seconds, mib) = (side.values() for side in sides.values())
        print(f"{stage:<8}{our_seconds:>8.1f} s {our_mib:>7.0f} MiB   TRL {seconds:>8.1f} s {mib:>7.0f} MiB")
    print(
        f"{result['seconds_ratio']:.2f} of TRL's time, {result['memory_ratio']:.2f} of its memory; "
        f"gold {result['gold']:.3f}, TRL {result['trl_gold']:.3f}"
    )


if __name__ == "__main__":
    main()
