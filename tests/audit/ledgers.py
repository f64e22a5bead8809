"""Files of three runs, written by hand, in which no two figures are alike.

Stages have prices of their own, devices wait, a process was killed, memory ran out, stages are reused, and the bounds
of an interval are at different distances. Swap any two figures on a page or take one price for another, and some
figure no longer agrees with these files.
"""

import hashlib
import json
from itertools import count
from pathlib import Path
from typing import Any

from config.load import load, write
from config.schema import Params
from tests.conftest import ROOT

FIRST, SECOND, THIRD = ("20261124-090000-calm-heron", "20261125-100000-brave-otter", "20261126-110000-shy-newt")
MIB = 2**20
PLACES = (
    "where={default: {pool: local, nodes: 1, processes: 1, sharding: none, offload: false}, "
    "reward: {pool: gpus, processes: 4}, ppo: {processes: 2}}"
)
CHANGES = {
    FIRST: ["prices.device=rtx4090", "prices.usd_per_device_hour=0.9", "prices.watts=170", "ppo.kl.coef=0.07", PLACES],
    SECOND: [
        "prices.device=rtx4090",
        "prices.usd_per_device_hour=1.3",
        "prices.usd_per_kwh=0.31",
        "prices.watts=170",
        "prices.device_by_pool={gpus: a100-80}",
        "prices.usd_per_device_hour_by_pool={gpus: 4.7}",
        "ppo.kl={controller: adaptive, coef: 0.05, target: 6.5, horizon: 10000}",
        PLACES,
    ],
    THIRD: ["prices.usd_per_device_hour=2.1", "seed=5"],
}
ON_GPUS = ("reward", "ppo")
BEGIN = {FIRST: 1_795_510_800.0, SECOND: 1_795_600_800.0, THIRD: 1_795_690_800.0}
PHASES = {
    "data": ("start", "read", "tokenise", "summarise"),
    "sft": ("start", "train", "save", "evaluate"),
    "reward": ("start", "train", "evaluate", "save"),
    "ppo": ("start", "rollout", "score", "reference", "value", "advantage", "update", "save"),
    "evaluate": ("start", "generate", "score"),
}
NO_TOKENS = ("start", "read", "summarise", "save", "advantage")
COUNTS = {
    "data": (
        "rows_read", "rows_kept", "rows_quarantined", "ties_dropped", "sft_duplicates",
        "replies_unranked", "preference_duplicates", "prompts_duplicates", "contradictory_pairs",
        "quarantined_too_long", "quarantined_empty_reply",
        *(
            f"{name}_{split}_{part}"
            for name in ("sft", "preference", "prompts")
            for split in ("train", "test")
            for part in ("rows", "unique_prompts", "tokens_p50", "tokens_p95", "tokens_max")
        ),
    ),
    "sft": ("parameters", "steps"),
    "reward": ("train_pairs", "test_pairs", "pairs_too_long", "steps"),
    "ppo": ("updates", "episodes"),
    "evaluate": ("prompts", "ties_gold", "ties_reward"),
}  # fmt: skip
NUMBERS = {
    "data": [
        "quarantine_fraction",
        "chosen_longer",
        "chosen_first",
        "gold_sft_mean",
        "bayes_accuracy",
        "baseline_longer_wins",
        "baseline_bow",
        "sft_train_tokens_mean",
        "sft_test_tokens_mean",
        "preference_train_tokens_mean",
        "preference_test_tokens_mean",
        "prompts_train_tokens_mean",
        "prompts_test_tokens_mean",
    ],
    "sft": ["eval_loss", "eval_token_accuracy", "train_loss"],
    "reward": [
        "accuracy",
        "ece",
        "margin_mean",
        "score_mean",
        "score_std",
        "bayes_accuracy",
        "baseline_longer_wins",
        "baseline_bow",
    ],
    "ppo": ["score", "kl", "entropy", "length", "eos_rate"],
    "evaluate": [
        *["kl", "right_item_rate", "right_item_rate_sft", "win_rate_gold", "win_rate_reward", "reward_gain"],
        *(
            f"{name}_{model}"
            for name in ("gold", "reward", "length", "eos_rate", "distinct_1", "distinct_2", "odd")
            for model in ("base", "sft", "aligned")
        ),
    ],
}
WITH_BOUNDS = {
    "data": ("baseline_longer_wins", "baseline_bow"),
    "reward": ("accuracy",),
    "evaluate": ("win_rate_gold", "win_rate_reward", "reward_gain", "gold_aligned", "reward_sft"),
}
CURVES = {
    "sft": [
        "loss",
        "validation_loss",
        "test_loss",
        "mean_token_accuracy",
        "eval_mean_token_accuracy",
        "learning_rate",
    ],
    "reward": ["loss", "validation_loss", "test_loss", "accuracy", "margin"],
    "ppo": [
        "score",
        "kl",
        "entropy",
        "length",
        "eos_rate",
        "clip_fraction",
        "value_clip_fraction",
        "explained_variance",
        "value_loss",
        "policy_loss",
        "ratio",
        "kl_coef",
        "grad_norm",
    ],
}


class Values:
    """Numbers between 0.51 and 0.97, each of which comes once."""

    def __init__(self) -> None:
        self._numbers = (0.51 + 0.46 * (0.6180339887 * n % 1) for n in count(1))

    def __call__(self) -> float:
        return round(next(self._numbers), 5)


class Writer:
    """Appends the rows of a run, and lets their seconds pass."""

    def __init__(self, root: Path, run_id: str, values: Values) -> None:
        self.root, self.run_id, self.time, self._values = root, run_id, BEGIN[run_id], values
        self.params = load(ROOT / "recipes" / "demo.yaml", CHANGES[run_id])
        self.kept = root / "runs" / "pipeline" / run_id
        self.kept.mkdir(parents=True)
        write(self.params, self.kept / "params.yaml")
        self._uses = count(1)

    def _append(self, name: str, **values: Any) -> None:
        path = self.root / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"time": self.time, "run_id": self.run_id, **values}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def pipeline(self, event: str, **values: Any) -> None:
        self._append("pipeline.jsonl", event=event, **values)

    def attempt(self, stage: str, number: int, event: str, step: int = 0, **values: Any) -> None:
        self._append(
            f"{stage}/attempts.jsonl", attempt=number, event=event, fingerprint=f"print of {stage}",
            pid=4242, step=step, device="cuda" if stage in ON_GPUS else "cpu",
            world_size=self.params.where.of(stage).processes, **values,
        )  # fmt: skip

    def use(self, stage: str, number: int, phase: str, step: int) -> None:
        """A phase of a step: its time, tokens and peak are those of no other."""
        n = next(self._uses)
        seconds = 1.0 + 0.613 * n % 7 + {FIRST: 0.11, SECOND: 0.0, THIRD: 0.07}[self.run_id]
        self.time += seconds
        tokens = 0 if phase in NO_TOKENS else 1009 * n + 17 * step
        self._append(
            f"{stage}/usage.jsonl", attempt=number, step=step, phase=phase, seconds=seconds,
            tokens=tokens, sequences=n, peak_bytes=(300 + 13 * n % 997) * MIB,
            device="cuda" if stage in ON_GPUS else "cpu",
            world_size=self.params.where.of(stage).processes,
        )  # fmt: skip

    def steps(self, stage: str, number: int, first: int, last: int, idle: float = 0.0) -> None:
        """Start or resume at `first`, and work until `last` is done. No row has `idle` seconds."""
        self.attempt(stage, number, "start")
        self.time += idle
        if first > 1:
            self.attempt(stage, number, "resume", first - 1)
        self.use(stage, number, "start", 0)
        for step in range(first, last + 1):
            for phase in PHASES[stage][1:]:
                self.use(stage, number, phase, step)
            bend = 0.93 if step == last else 1.0  # the last value is not the highest
            values = {
                name: (0.91 + 0.037 * i) * step / (step + 1.3 + 0.1 * number) * bend
                for i, name in enumerate(CURVES.get(stage, ()))
            }
            if values:
                self._append(f"{stage}/metrics.jsonl", attempt=number, step=step, values=values)

    def done(self, stage: str, number: int, step: int, outs: dict[str, str]) -> None:
        self.attempt(stage, number, "end", step, exit_code=0)
        self.pipeline("stage", stage=stage, attempt=number, state="done", detail={"outs": outs})

    def outputs(self, stage: str, seed: float, into: Path) -> dict[str, str]:
        """Write what a stage leaves; its paths with their digests."""
        values = self._values
        metrics: dict[str, Any] = {
            name: round(1000 * values() * (3 if name.endswith("train_rows") else 1)) for name in COUNTS[stage]
        }
        metrics |= {name: values() for name in NUMBERS[stage]}
        metrics |= {name: round(30 * values(), 3) for name in metrics if name.endswith("_mean") and "tokens" in name}
        for i, name in enumerate(WITH_BOUNDS.get(stage, ())):
            metrics[f"{name}_low"] = round(metrics[name] - 0.013 - 0.0021 * i, 5)
            metrics[f"{name}_high"] = round(metrics[name] + 0.027 + 0.0034 * i, 5)
        if stage == "sft":
            metrics["parameters"] = 459_168 + round(1000 * seed)
        if stage == "evaluate":
            metrics |= {"confidence": 0.95, "reward_hacking": False, "reward_hacking_reason": "both are up"}
        if stage == "reward":  # the baselines' bounds are the data stage's
            for name in ("baseline_longer_wins", "baseline_bow", "bayes_accuracy"):
                metrics[name] = self._metrics(into, "data")[name]
        files = {f"metrics/{stage}.json": json.dumps(metrics)}
        if stage == "reward":
            bins = [(0.55, 0.5371, 211), (0.72, 0.7713, 193), (0.93, 0.9019, 402)]
            files["plots/reward_calibration.csv"] = _csv("confidence accuracy count", bins)
        if stage == "data":
            bars = [
                (name, split, edge, 10 * edge + len(name) + len(split))
                for name in ("sft", "preference")
                for split in ("train", "test")
                for edge in (0, 4, 8)
            ]
            files["plots/data_lengths.csv"] = _csv("dataset split tokens sequences", bars)
        if stage == "evaluate":
            rows: list[dict[str, Any]] = []
            for i in range(2):
                row: dict[str, Any] = {"prompt": f"question {i} about a kettle"}
                for model in ("base", "sft", "aligned"):
                    row[model] = f"the {model} reply {i} of {self.run_id}"
                    row |= {f"gold_{model}": values(), f"reward_{model}": values()}
                rows.append(row)
            files["evaluation/samples.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        for name, content in files.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(content, encoding="utf-8")
        digests = {
            name: hashlib.md5(content.encode(), usedforsecurity=False).hexdigest() for name, content in files.items()
        }
        return digests | _folders(stage, seed)

    @staticmethod
    def _metrics(into: Path, stage: str) -> dict[str, Any]:
        return dict(json.loads((into / "metrics" / f"{stage}.json").read_text(encoding="utf-8")))

    def reuse(self, stage: str, number: int, outs: dict[str, str]) -> None:
        self.pipeline("stage", stage=stage, attempt=number, cached=True, detail={"outs": outs})


def _folders(stage: str, seed: float) -> dict[str, str]:
    folder = "data/prepared" if stage == "data" else f"models/{stage}"
    digest = hashlib.md5(f"{stage} {seed}".encode(), usedforsecurity=False).hexdigest()
    return {} if stage == "evaluate" else {folder: f"{digest}.dir"}


def _csv(header: str, rows: list[Any]) -> str:
    lines = [header.split(), *rows]
    return "".join(",".join(map(str, line)) + "\r\n" for line in lines)


def _plan(run_id: str) -> dict[str, Any]:
    """What was planned: of every stage but evaluate, each number its own."""
    stages = []
    for i, (stage, phases) in enumerate(list(PHASES.items())[:-1], start=1):
        planned = [
            {"phase": name, "seconds": 3.1 * i + 1.7 * j, "peak_bytes": (200 + 31 * i + 7 * j) * MIB}
            for j, name in enumerate(phases)
        ]
        stages.append(
            {
                "stage": stage, "hardware": "a100-80" if stage == "reward" else "cpu",
                "gpus": {"reward": 4, "ppo": 2}.get(stage, 1),
                "rented": 4 if stage == "reward" else 2,
                "seconds": 11.3 * i + len(run_id), "peak_bytes_per_gpu": (500 + 37 * i) * MIB,
                "phases": planned,
            }
        )  # fmt: skip
    return {"stages": stages, "hardware": "the planned machine"}


def write_ledgers(root: Path) -> dict[str, Params]:
    """Write the files of the three runs below `root`; the params of each."""
    (root / "dvc.yaml").touch()
    (root / "config").mkdir()
    (root / "config" / "schema.py").touch()
    values = Values()
    first = Writer(root, FIRST, values)
    first.pipeline("start", detail={"git.commit": "abc123", "dvc.remote": "/remote"})
    outs = {}
    for stage, last in (("data", 1), ("sft", 4), ("reward", 3), ("ppo", 4), ("evaluate", 2)):
        first.steps(stage, 1, 1, last)
        outs[stage] = first.outputs(stage, 1.0, first.kept)
        first.done(stage, 1, last, outs[stage])
    (first.kept / "plan.json").write_text(json.dumps(_plan(FIRST)))
    first.time += 3.3
    first.pipeline("end", state="completed")

    second = Writer(root, SECOND, values)
    second.pipeline("start", detail={"git.commit": "def456", "dvc.remote": "/remote"})
    for stage in ("data", "sft"):
        for name in outs[stage]:
            if (first.kept / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes((first.kept / name).read_bytes())
        second.reuse(stage, 1, outs[stage])
    # the reward model: killed where its machine went away, then done elsewhere
    second.steps("reward", 2, 1, 3)
    second.attempt("reward", 2, "lost", 3, lived_seconds=second.time - BEGIN[SECOND] + 5.7)
    second.steps("reward", 3, 3, 6)
    second.done("reward", 3, 6, second.outputs("reward", 2.0, root))
    # PPO: killed after step 4, resumed from the checkpoint of step 2; memory ran out in step 4
    second.steps("ppo", 2, 1, 4, idle=2.9)
    second.steps("ppo", 3, 3, 6)
    second.time -= 0.4
    second.attempt("ppo", 3, "retry", 6, message="micro_batch_tokens=2048", lost_seconds=0.25)
    second.time += 0.4
    second.done("ppo", 3, 6, second.outputs("ppo", 3.0, root))
    second.steps("evaluate", 2, 1, 3)
    second.done("evaluate", 2, 3, second.outputs("evaluate", 4.0, root))
    (second.kept / "plan.json").write_text(json.dumps(_plan(SECOND)))
    second.time += 4.4
    second.pipeline("end", state="completed")

    third = Writer(root, THIRD, values)
    third.pipeline("start")
    for stage in ("data", "sft"):
        third.reuse(stage, 1, outs[stage])
    third.steps("reward", 4, 1, 2)
    third.attempt("reward", 4, "end", 2, exit_code=3, message="the loss is nan at step 2.")
    third.pipeline("end", state="failed")
    write(second.params, root / "params.yaml")
    return {writer.run_id: writer.params for writer in (first, second, third)}
