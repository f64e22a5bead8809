"""Fixed costs of a stage process: `sft` (a Trainer) and `ppo` (our loop), each run on a handful of
rows; and updates of PPO on a larger model.

python -m training.calibrate.stages sft [trunks]    in a folder that `project` made: the stage, and
one line of JSON about the process
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from config import jsonl
from config.compose import compose
from config.errors import ModelError
from config.load import dump, read, validate
from config.records import UsageRow
from config.sections.data import HelpdeskSource
from config.workspace.machine import Loop, Passes, StageProcess

STAGES = ("sft", "ppo")
"""Stages represented: sft for those on a Trainer, ppo for the others."""
STEPS = 6
ROWS = 8 * STEPS
OUT, TRUNKS_AFTER = "process.json", "trunks.json"
ROOT = Path(__file__).parents[2]
VOCABULARY = 320
"""Also the entries of the tokenizer."""
OVERRIDES = (
    "model.random.width=32",
    "model.random.layers=1",
    "model.random.heads=2",
    "model.random.kv_heads=2",
    "model.random.mlp_width=64",
    f"model.random.vocab_size={VOCABULARY}",
    "model.context_length=128",
    "sft.batch_size=8",
    "sft.micro_batch_size=8",
    f"sft.max_steps={STEPS}",
    "sft.checkpoint_every_steps=1000000",
    "sft.max_length=64",
    "ppo.batch_size=8",
    "ppo.rollout_batch_size=8",
    "ppo.max_new_tokens=4",
    "ppo.ppo_epochs=1",
    "ppo.num_mini_batches=1",
    "ppo.updates=3",
    "ppo.checkpoint_every_updates=1000000",
    "ppo.missing_eos_penalty=0.0",
    "ppo.sample_every_updates=1000000",
    "ppo.responses_per_prompt=1",
    "model.dtype=fp32",
    "model.attention=sdpa",
)


LOOP = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 384, "vocab": VOCABULARY}
UPDATES, SEQUENCES, RESPONSE_TOKENS, MICRO_BATCH_TOKENS, EPOCHS, MINI_BATCHES = (
    3,
    32,
    32,
    1024,
    1,
    2,
)
LOOP_OVERRIDES = (
    *OVERRIDES,
    *(f"model.random.{name}={LOOP[name]}" for name in ("width", "layers", "heads", "mlp_width")),
    f"model.random.kv_heads={LOOP['heads']}",
    f"ppo.batch_size={SEQUENCES}",
    f"ppo.rollout_batch_size={SEQUENCES}",
    f"ppo.max_new_tokens={RESPONSE_TOKENS}",
    f"ppo.micro_batch_tokens={MICRO_BATCH_TOKENS}",
    f"ppo.ppo_epochs={EPOCHS}",
    f"ppo.num_mini_batches={MINI_BATCHES}",
    f"ppo.updates={UPDATES}",
    "ppo.layout=separate",
)


def loop(folder: Path) -> Loop:
    """Run some updates of PPO in a separate process, below `folder`. Raises ModelError if it
    fails.
    """
    project(folder, LOOP_OVERRIDES)
    _await(folder, {"ppo": _started(folder, "ppo", "trunks")})
    _, share, rows = _noted(folder, "ppo")
    spent: dict[str, float] = {}
    for row in rows:
        if row.step > 1:  # the first warms up
            spent[row.phase] = spent.get(row.phase, 0.0) + row.seconds * share / (UPDATES - 1)
    rollouts = [row for row in rows if row.phase == "rollout"]
    tokens = sum(row.tokens for row in rollouts) / sum(row.sequences for row in rollouts)
    return Loop(
        **LOOP,
        sequences=SEQUENCES,
        prompt_tokens=tokens - RESPONSE_TOKENS,
        response_tokens=RESPONSE_TOKENS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        epochs=EPOCHS,
        mini_batches=MINI_BATCHES,
        rollout_seconds=spent["rollout"],
        scoring_seconds=spent["score"] + spent["reference"] + spent["value"],
        update_seconds=spent["update"],
        trunks=tuple(
            Passes.model_validate(each)
            for each in json.loads((folder / TRUNKS_AFTER).read_text(encoding="utf-8"))
        ),
    )


def stage_processes(folder: Path) -> dict[str, StageProcess]:
    """Run both kinds of stage in parallel, each in a separate process with one thread, which suits
    negligible models.

    Raises ModelError if one fails: then no stage would run here.
    """
    project(folder, OVERRIDES)
    _await(folder, {stage: _started(folder, stage, OMP_NUM_THREADS="1") for stage in STAGES})
    return {stage: _of_process(folder, stage) for stage in STAGES}


def _started(folder: Path, stage: str, *also: str, **settings: str) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        **settings,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"{stage}.log").open("wb") as log:
        command = [sys.executable, "-m", "training.calibrate.stages", stage, *also]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def _await(folder: Path, started: "Mapping[str, subprocess.Popen[bytes]]") -> None:
    """Wait for all processes; raises ModelError with the last line of a failed one."""
    codes = {stage: process.wait() for stage, process in started.items()}
    for stage, code in codes.items():
        if code:
            printed = (folder / f"{stage}.log").read_text(
                encoding="utf-8", errors="replace"
            ).strip().splitlines() or ["nothing was printed"]
            raise ModelError(
                f"a small {stage} stage fails on this machine, so it cannot be measured: "
                f"{printed[-1]}. Try rlhf doctor."
            )


def _noted(folder: Path, stage: str) -> tuple[dict[str, Any], float, list[UsageRow]]:
    """What `main` noted; CPU seconds per second of the stage, as other programs cause waiting for a
    core; its usage rows.
    """
    noted: dict[str, Any] = json.loads((folder / f"{stage}-{OUT}").read_text(encoding="utf-8"))
    rows = list(jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows)
    return noted, min(1.0, noted["cpu_seconds"] / sum(row.seconds for row in rows)), rows


def _of_process(folder: Path, stage: str) -> StageProcess:
    noted, share, rows = _noted(folder, stage)
    steps: dict[int, float] = {}
    for row in rows:
        if row.phase not in ("start", "save", "other", "evaluate"):
            steps[row.step] = steps.get(row.step, 0.0) + row.seconds * share
    step = median(list(steps.values())[1:])
    start = sum(row.seconds for row in rows if row.phase == "start") * share
    if stage == "sft":
        start -= step  # a Trainer's first step counts as start
    return StageProcess(
        imports_seconds=noted["imports_seconds"],
        start_seconds=start,
        step_seconds=step,
        after_imports_bytes=noted["after_imports_bytes"],
    )


def project(folder: Path, overrides: Sequence[str]) -> None:
    """Write params, tokenizer, rows and models below `folder`."""
    from training.modeling.models import base_model, new_reward_model
    from training.modeling.tokenizer import trained_tokenizer
    from training.preparation import helpdesk
    from training.process.artifacts import write_jsonl

    content = compose(read(ROOT / "recipes" / "demo.yaml"), {}, list(overrides))
    content["data"]["source"] |= {"sft_rows": ROWS, "preference_rows": ROWS, "prompt_rows": ROWS}
    params = validate(content, "the params of a calibration")
    (folder / "params.yaml").write_text(dump(params), encoding="utf-8")
    assert isinstance(params.data.source, HelpdeskSource)
    world = helpdesk.generate(params.data.source, params.seed)._asdict()
    tokenizer = trained_tokenizer([row["completion"] for row in world["sft"]] * 2, VOCABULARY)
    tokenizer.save_pretrained(folder / "data/tokenizer")
    for dataset in ("sft", "prompts"):
        for split in ("train", "test"):
            path = folder / f"data/prepared/{dataset}/{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, world[dataset])
    for place in ("metrics", "plots"):
        (folder / place).mkdir(exist_ok=True)
    policy = base_model(params.model, tokenizer, params.seed, trainable=True)
    policy.save_pretrained(folder / "models" / "sft")
    new_reward_model(policy, params.model, tokenizer, params.seed).save_pretrained(
        folder / "models" / "reward"
    )


def main(stage: str, with_trunks: bool = False) -> int:
    """Run a stage as its own module does, and record the resources of the process."""
    from training.process.stage import entry, run_stage

    own = entry(stage)
    imports, held = time.process_time(), psutil.Process().memory_info().rss
    code = run_stage(stage, *own)
    noted = {
        "imports_seconds": imports,
        "after_imports_bytes": held,
        "cpu_seconds": time.process_time(),
    }
    Path(f"{stage}-{OUT}").write_text(json.dumps(noted), encoding="utf-8")
    if with_trunks:
        write_trunks()
    return int(code)


def write_trunks() -> None:
    """Measure trunks now, on the device of the stage."""
    # imported late: imports that a stage does not need must not count for it
    from training.calibrate.rates import pace
    from training.process.device import device

    Path(TRUNKS_AFTER).write_text(json.dumps(pace(device().type)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "trunks" in sys.argv[2:]))
