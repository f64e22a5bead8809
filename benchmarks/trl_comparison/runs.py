"""One measured run of either trainer in a fresh process, and what its files say.

Both get the same prompts, models and hyper-parameters. Ours runs in a folder of its own whose data and models point to
the workspace; TRL's gets a job.json.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.projects.checkouts import ROOT
from benchmarks.projects.processes import run_logged, stage_process
from benchmarks.trl_comparison.trl_venv import bench_python
from benchmarks.trl_comparison.workspaces import Workspace
from config import jsonl
from config.compose import compose
from config.load import validate, write
from config.records import MetricRow, UsageRow
from config.schema import Params
from training.modeling.adapters import MATRICES
from training.modeling.models import load_policy
from training.modeling.tokenizer import decode_response, encode_prompts, load_tokenizer
from training.rollout.engine import Limits, sampling_noise
from training.rollout.static import generate
from training.worlds.helpdesk import gold_score

GOLD_PROMPTS = 400
SMOOTHED_UPDATES = 3
"""Updates whose responses together say whether a gold score is reached."""


@dataclass(frozen=True)
class Measurement:
    """What one run took."""

    update_seconds: list[float]
    """Wall time from the end of one update to the end of the next; the first one is from the start of training."""
    phases: dict[str, float]
    """Mean seconds per update of each phase, over the updates after the first."""
    peak_bytes: int
    """Above what the process held after its imports; the allocator's peak on an accelerator."""
    batch_size: int
    prompt_lengths: list[list[int]]
    """Tokens, per update and episode."""
    response_lengths: list[list[int]]
    golds: list[float]
    """Mean gold score of the responses each update learnt from."""
    gold_final: float
    """Mean gold score of the final policy on held-out prompts."""

    @property
    def steady(self) -> slice:
        """The updates that are timed: all but the first, which pays for warming up, unless it is the only one."""
        return slice(1 if len(self.update_seconds) > 1 else 0, None)

    @property
    def episodes_per_second(self) -> float:
        return self.batch_size / fmean(self.update_seconds[self.steady])

    @property
    def mean_response_tokens(self) -> float:
        return fmean(length for lengths in self.response_lengths for length in lengths)

    def seconds_to_gold(self, target: float) -> float | None:
        """Training time until the mean gold score of SMOOTHED_UPDATES updates is `target`; None if it never is."""
        for update in range(SMOOTHED_UPDATES, len(self.golds) + 1):
            if fmean(self.golds[update - SMOOTHED_UPDATES : update]) >= target:
                return sum(self.update_seconds[:update])
        return None


def ppo_params(workspace: Workspace, overrides: Sequence[str]) -> Params:
    """The workspace's params with `overrides`. Raises ParamsError if the schema refuses them."""
    return validate(
        compose(workspace.params.model_dump(mode="json"), {}, list(overrides)), "the benchmark's overrides"
    )


def run_ours(workspace: Workspace, params: Params, folder: Path, environment: Mapping[str, str]) -> Measurement:
    """Our ppo stage with `params` in `folder`, which is emptied first."""
    _linked(workspace, folder, ("sft", "reward"))
    write(params, folder / "params.yaml")
    stage_process(folder, "benchmarks.trl_comparison.our_side", environment, "ppo")
    metrics = jsonl.read(folder / "runs/ppo/metrics.jsonl", MetricRow).rows
    usage = jsonl.read(folder / "runs/ppo/usage.jsonl", UsageRow).rows
    ends = [row.time for row in metrics]
    seconds = [metrics[0].values["seconds"], *(after - before for before, after in pairwise(ends))]
    first_timed = 2 if len(ends) > 1 else 1
    phases: dict[str, float] = {}
    for row in usage:
        if first_timed <= row.step and row.phase not in ("start", "save", "other"):
            phases[row.phase] = phases.get(row.phase, 0.0) + row.seconds / (len(ends) - first_timed + 1)
    return _measurement(
        workspace,
        params,
        seconds,
        phases,
        _peak_bytes(folder, "ppo"),
        folder / "bench/responses.jsonl",
        folder / "models/ppo",
    )


def sft_peak_bytes(workspace: Workspace, params: Params, folder: Path, environment: Mapping[str, str]) -> int:
    """Peak memory of our sft stage, as Measurement counts it, with PPO's LoRA and as many tokens at once as PPO's
    micro-batch holds.

    It starts from models/sft, so that the base is the same; two steps.
    """
    _linked(workspace, folder, ())
    rows = max(1, params.ppo.micro_batch_tokens // params.sft.max_length)
    overrides = [
        "model.random=null",
        f"model.path={workspace.folder / 'models/sft'}",
        f"sft.lora={params.model_dump(mode='json')['ppo']['lora']}",
        f"sft.batch_size={rows}",
        f"sft.micro_batch_size={rows}",
        "sft.max_steps=2",
    ]
    changed = compose(params.model_dump(mode="json"), {}, overrides)
    write(validate(changed, str(folder)), folder / "params.yaml")
    stage_process(folder, "benchmarks.trl_comparison.our_side", environment, "sft")
    return _peak_bytes(folder, "sft")


def _linked(workspace: Workspace, folder: Path, models: Sequence[str]) -> None:
    """An empty `folder` with the workspace's data and some of its models."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "models").mkdir(parents=True)
    (folder / "data").symlink_to(workspace.folder / "data")
    for model in models:
        (folder / "models" / model).symlink_to(workspace.folder / "models" / model)


def _peak_bytes(folder: Path, stage: str) -> int:
    """Highest peak of any phase but saving, above what the process held after its imports."""
    usage = jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows
    process = json.loads((folder / "bench/process.json").read_text(encoding="utf-8"))
    peak: int = (
        max(row.peak_bytes for row in usage if row.phase not in ("save", "other", "evaluate"))
        - process["after_imports_bytes"]
    )
    return peak


def run_trl(
    workspace: Workspace, params: Params, folder: Path, environment: Mapping[str, str], accumulation: int = 1
) -> Measurement:
    """TRL's PPO with the hyper-parameters of `params` in `folder`, which is emptied first.

    `accumulation` micro-batches make an optimizer step. Above 1 TRL steps once per epoch whatever ppo.num_mini_batches
    says, so it is refused then.
    """
    if accumulation > 1 and params.ppo.num_mini_batches > 1:
        raise SystemExit(
            f"--trl-accumulation {accumulation}: with it TRL takes one optimizer step per epoch, "
            f"not ppo.num_mini_batches={params.ppo.num_mini_batches}. Add --set ppo.num_mini_batches=1."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = {
        "sft": str(workspace.folder / "models/sft"),
        "reward": str(workspace.whole_reward),
        "tokenizer": str(workspace.folder / "data/tokenizer"),
        "prompts": str(write_prompts(workspace, params, folder)),
        "ppo": params.ppo.model_dump(mode="json"),
        "dtype": params.model.dtype,
        "attention": params.model.attention,
        "seed": params.seed,
        "accumulation": accumulation,
        "lora": lora_of(params),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    run_logged(
        [str(bench_python()), str(ROOT / "benchmarks/trl_comparison/trl_side.py"), str(folder)],
        folder,
        "trl.log",
        {**environment, **quiet},
    )
    return _trl_measurement(workspace, params, folder)


def _trl_measurement(workspace: Workspace, params: Params, folder: Path) -> Measurement:
    """What the files say that TRL's process left."""
    rows = list(jsonl.plain(folder / "updates.jsonl"))
    process = json.loads((folder / "process.json").read_text(encoding="utf-8"))
    timed = rows[1:] or rows
    names = {name for row in timed for name in row["phases"]} - {"other"}
    phases = {name: sum(row["phases"].get(name, 0.0) for row in timed) / len(timed) for name in sorted(names)}
    peak_bytes = process["peak_bytes"] - process["after_imports_bytes"]
    return _measurement(
        workspace,
        params,
        [row["seconds"] for row in rows],
        phases,
        peak_bytes,
        folder / "responses.jsonl",
        folder / "policy",
    )


def lora_of(params: Params) -> dict[str, Any] | None:
    """LoRA of the policy as {rank, alpha, dropout, targets}, None without: TRL gets the same."""
    lora = params.ppo.lora
    if lora is None:
        return None
    # Llama's names
    targets = [MATRICES[module][0] if module in MATRICES else module for module in lora.modules]
    return {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout, "targets": targets}


def write_prompts(workspace: Workspace, params: Params, folder: Path) -> Path:
    """The training prompts our stage uses: those that leave room for a whole response."""
    tokenizer = load_tokenizer(workspace.folder / "data/tokenizer")
    rows = [row["prompt"] for row in jsonl.plain(workspace.folder / "data/prepared/prompts/train.jsonl")]
    room = params.model.context_length - params.ppo.max_new_tokens
    fitting = [ids for ids in encode_prompts(tokenizer, rows) if len(ids) <= room]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in fitting), encoding="utf-8")
    return path


def _measurement(
    workspace: Workspace,
    params: Params,
    seconds: list[float],
    phases: dict[str, float],
    peak_bytes: int,
    responses: Path,
    policy: Path,
) -> Measurement:
    tokenizer = load_tokenizer(workspace.folder / "data/tokenizer")
    golds, prompt_lengths, response_lengths = [], [], []
    for row in jsonl.plain(responses):
        prompt_lengths.append([len(ids) for ids in row["prompts"]])
        response_lengths.append([len(ids) for ids in row["responses"]])
        prompts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in row["prompts"]]
        texts = [decode_response(tokenizer, ids) for ids in row["responses"]]
        golds.append(fmean(gold_score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)))
    return Measurement(
        seconds,
        phases,
        peak_bytes,
        params.ppo.batch_size,
        prompt_lengths,
        response_lengths,
        golds,
        gold_of(policy, workspace.folder, params),
    )


@torch.no_grad()
def gold_of(policy: Path, folder: Path, params: Params) -> float:
    """Mean gold score of a policy's sampled responses to the first GOLD_PROMPTS held-out prompts, the same random
    numbers for all.
    """
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    prompts = [row["prompt"] for row in jsonl.plain(folder / "data/prepared/prompts/test.jsonl")][:GOLD_PROMPTS]
    model = load_policy(policy, params.model, tokenizer).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    limits = Limits(params.ppo.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    noise_BT = sampling_noise(len(prompts), limits.max_new_tokens, params.seed)
    rollout = generate(
        model, encode_prompts(tokenizer, prompts), noise_BT, params.ppo.temperature, limits, batch_size=200
    )
    return fmean(gold_score(p, decode_response(tokenizer, r)) for p, r in zip(prompts, rollout.responses, strict=True))
