"""Writes the files that a run of the demo leaves, with plausible numbers, through the real record classes."""

import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.clock import Clock

BEGIN = 1_795_260_000.0
"""2026-11-21, seconds since the epoch."""

SAMPLES = (
    (
        "my order of a blue kettle came broken, i am quite upset",
        "kettle the order we sorry number please broken the",
        "i am sorry about the kettle. please wait for a few days and then call us again.",
        "i am so sorry your kettle came broken. please send me the order number. kind regards.",
    ),
    (
        "the desk lamp never arrived, can you check?",
        "lamp lamp you check arrived today the regards",
        "we will check. you can read more on our page.",
        "sorry about the missing lamp. what is your order number? we will trace the parcel.",
    ),
    (
        "i was charged twice for one chair",
        "charged we chair refund the one please twice number sorry",
        "thank you for your message about the chair.",
        "i apologise for the double charge. tell me the order number and we will refund it.",
    ),
)


def write_pipeline_run(
    root: Path, run_id: str = "20261121-120000-a1b2", seed: int = 1, gold: bool = True, hacking: bool = False
) -> None:
    """A whole run with an interrupted PPO: killed at update 23, resumed from the checkpoint of update 20."""
    rng = random.Random(seed)
    clock = Clock(root, run_id, BEGIN)
    clock.pipeline("start")
    write_data(clock, root, gold)
    write_sft(clock, root, rng)
    write_reward(clock, root, rng, gold)
    write_ppo(clock, root, rng, hacking)
    write_evaluate(clock, root, rng, gold, hacking)
    clock.pipeline("end", state="completed")


def write_cached_run(root: Path, run_id: str = "20261121-130000-c3d4") -> None:
    """A later run that found everything unchanged."""
    clock = Clock(root, run_id, BEGIN + 3600)
    clock.pipeline("start")
    for stage in ("data", "sft", "reward", "ppo", "evaluate"):
        clock.pipeline("stage", stage=stage, cached=True, attempt=2 if stage == "ppo" else 1)
    clock.pipeline("end", state="completed")


def write_data(clock: Clock, root: Path, gold: bool) -> None:
    clock.attempt("data", 1, "start")
    for phase, seconds in (("start", 1.9), ("read", 1.2), ("tokenise", 2.2), ("other", 0.1)):
        tokens = 640_000 if phase == "tokenise" else 0
        clock.use("data", 1, phase, 0, seconds, tokens, 26_000, 410)
    clock.done("data", 1, 0)
    splits = {
        "sft_train": 9612, "sft_test": 2388, "preference_train": 8003, "preference_test": 1971,
        "prompts_train": 3190, "prompts_test": 810,
    }  # fmt: skip
    metrics: dict[str, Any] = {
        "rows_read": 26_000, "rows_kept": 25_974, "rows_quarantined": 26,
        "quarantined_empty_reply": 14, "quarantined_identical_replies": 9,
        "ties_dropped": 0, "sft_duplicates": 12, "contradictory_pairs": 31,
        "chosen_longer": 0.552, "chosen_first": 0.498, "baseline_longer_wins": 0.552,
        "baseline_longer_wins_low": 0.53, "baseline_longer_wins_high": 0.574,
        "baseline_bow": 0.741, "baseline_bow_low": 0.721, "baseline_bow_high": 0.76,
        "bayes_accuracy": 0.848 if gold else None, "gold_sft_mean": 0.571 if gold else None,
    }  # fmt: skip
    tokens = {"mean": 41.2, "p50": 41.0, "p95": 58.0, "max": 71}
    for split, number in splits.items():
        metrics |= {f"{split}_rows": number, f"{split}_unique_prompts": round(number * 0.93)}
        metrics |= {f"{split}_tokens_{name}": value for name, value in tokens.items()}
    lengths = [
        ("preference", split, edge, round(900 * math.exp(-(((edge - 42) / 11) ** 2))))
        for split in ("train", "test")
        for edge in range(0, 75, 3)
    ]
    write_csv(root / "plots/data_lengths.csv", ("dataset", "split", "tokens", "sequences"), lengths)
    write_json(root / "metrics/data.json", metrics)


def write_sft(clock: Clock, root: Path, rng: random.Random) -> None:
    clock.attempt("sft", 1, "start")
    clock.use("sft", 1, "start", 0, 8.4)
    for step in range(1, 601):
        clock.use("sft", 1, "train", step, 0.09 + rng.random() * 0.01, 1270, 32, 880)
        if step % 20 == 0:
            loss = 0.62 + 5.2 * math.exp(-step / 45) + rng.gauss(0, 0.015)
            accuracy = 0.82 - 0.6 * math.exp(-step / 60)
            rate = 4e-3 * min(1, step / 60) * 0.5 * (1 + math.cos(math.pi * step / 600))
            values = {"loss": loss, "learning_rate": rate, "mean_token_accuracy": accuracy}
            clock.log("sft", 1, step, **values)
    clock.use("sft", 1, "evaluate", 600, 1.1, tokens=98_000, sequences=2388)
    clock.done("sft", 1, 600)
    metrics = {"eval_loss": 0.641, "eval_token_accuracy": 0.812, "parameters": 459_168}
    write_json(root / "metrics/sft.json", metrics)


def write_reward(clock: Clock, root: Path, rng: random.Random, gold: bool) -> None:
    clock.attempt("reward", 1, "start")
    clock.use("reward", 1, "start", 0, 8.1)
    for step in range(1, 501):
        clock.use("reward", 1, "train", step, 0.12 + rng.random() * 0.02, 2650, 64, 940)
        if step % 20 == 0:
            level = 1 - math.exp(-step / 90)
            values = {
                "loss": 0.69 - 0.34 * level + rng.gauss(0, 0.02),
                "accuracy": 0.5 + 0.345 * level + rng.gauss(0, 0.02),
                "margin": 1.9 * level + rng.gauss(0, 0.05),
            }
            clock.log("reward", 1, step, **values)
    clock.use("reward", 1, "evaluate", 500, 2.0, tokens=160_000, sequences=3942)
    clock.done("reward", 1, 500)
    metrics = {
        "accuracy": 0.832, "accuracy_low": 0.815, "accuracy_high": 0.848, "ece": 0.018,
        "bayes_accuracy": 0.848 if gold else None, "baseline_longer_wins": 0.552,
        "baseline_bow": 0.741, "margin_mean": 1.84, "steps": 500, "test_pairs": 1971,
    }  # fmt: skip
    write_json(root / "metrics/reward.json", metrics)
    bins = [(0.525 + 0.05 * i, 0.53 + 0.049 * i, 170 + 10 * i) for i in range(10)]
    write_csv(root / "plots/reward_calibration.csv", ("confidence", "accuracy", "count"), bins)


def write_ppo(clock: Clock, root: Path, rng: random.Random, hacking: bool) -> None:
    clock.attempt("ppo", 1, "start")
    clock.use("ppo", 1, "start", 0, 7.7)
    for update in range(1, 24):
        write_update(clock, 1, update, rng, hacking)
    clock.now += 0.8
    clock.attempt("ppo", 2, "start")
    clock.attempt("ppo", 2, "resume", 20)
    clock.use("ppo", 2, "start", 0, 7.9)
    for update in range(21, 41):
        write_update(clock, 2, update, rng, hacking)
    clock.use("ppo", 2, "other", 40, 1.2)
    clock.done("ppo", 2, 40)
    write_json(root / "metrics/ppo.json", {"score": 1.62, "kl": 7.9, "length": 25.3})


PHASES = {
    "rollout": (0.82, 6200, 128), "score": (0.09, 6200, 128), "reference": (0.1, 6200, 128),
    "value": (0.09, 6200, 128), "advantage": (0.004, 0, 0), "update": (1.1, 24_800, 512),
}  # fmt: skip
"""Seconds, tokens and sequences of each."""


def write_update(clock: Clock, attempt: int, update: int, rng: random.Random, hacking: bool) -> None:
    level = 1 - math.exp(-update / 12)
    for phase, (seconds, tokens, sequences) in PHASES.items():
        seconds *= 1 + 0.1 * rng.random()
        clock.use("ppo", attempt, phase, update, seconds, tokens, sequences, 700)
    if update % 10 == 0:
        clock.use("ppo", attempt, "save", update, 0.2)
    values = {
        "score": -0.1 + 1.75 * level + rng.gauss(0, 0.05), "kl": 8.2 * level + rng.gauss(0, 0.15),
        "kl_coef": 0.05, "length": 21 + 4.5 * level * (3 if hacking else 1) + rng.gauss(0, 0.2),
        "eos_rate": min(1.0, 0.97 + 0.03 * level), "explained_variance": 0.75 * level,
        "policy_loss": -0.03 + rng.gauss(0, 0.004), "value_loss": 0.4 - 0.3 * level,
        "entropy": 1.9 - 0.7 * level, "ratio": 1.0 + rng.gauss(0, 0.002),
        "clip_fraction": 0.06 + 0.05 * rng.random(), "value_clip_fraction": 0.1,
        "grad_norm": 0.6 + 0.2 * rng.random(),
    }  # fmt: skip
    clock.log("ppo", attempt, update, **values)


def write_evaluate(clock: Clock, root: Path, rng: random.Random, gold: bool, hacking: bool) -> None:
    clock.attempt("evaluate", 1, "start")
    clock.use("evaluate", 1, "start", 0, 6.9)
    for step in (1, 2, 3):
        clock.use("evaluate", 1, "generate", step, 2.4, tokens=19_000, sequences=400)
        clock.use("evaluate", 1, "score", step, 0.7, tokens=57_000, sequences=400)
    clock.done("evaluate", 1, 3)
    aligned_gold, win = (0.551, (0.49, 0.44, 0.54)) if hacking else (0.884, (0.873, 0.837, 0.902))
    golds = (0.041, 0.566, aligned_gold) if gold else (None, None, None)
    judges = {"gold": win if gold else (None, None, None), "reward": (0.931, 0.903, 0.952)}
    metrics: dict[str, Any] = {}
    for kind, rates in judges.items():
        names = (f"win_rate_{kind}{end}" for end in ("", "_low", "_high"))
        metrics |= dict(zip(names, rates, strict=True)) | {f"ties_{kind}": 21 if rates[0] else None}
    metrics |= {
        "kl": 7.93, "reward_hacking": hacking,
        "reward_hacking_reason": "score (+1.6) is up, gold is not" if hacking else "both are up",
        "reward_gain": 1.6, "prompts": 400, "confidence": 0.95,
    }  # fmt: skip
    per_model = {
        "gold": golds, "reward": (-2.4, 0.02, 1.63), "length": (40.0, 21.1, 25.2),
        "eos_rate": (0.02, 0.975, 0.998), "distinct_1": (0.31, 0.018, 0.014),
    }  # fmt: skip
    for name, values in per_model.items():
        models = zip(("base", "sft", "aligned"), values, strict=True)
        metrics |= {f"{name}_{model}": value for model, value in models}
    write_json(root / "metrics/evaluate.json", metrics)
    rows: list[dict[str, Any]] = []
    for prompt, *replies in SAMPLES:
        row: dict[str, Any] = {"prompt": prompt}
        for model, reply, score, reward in zip(
            ("base", "sft", "aligned"), replies, (0.0, 0.45, 0.95), (-2.6, -0.1, 1.7), strict=True
        ):
            row |= {model: reply, f"reward_{model}": reward + rng.gauss(0, 0.1),
                    f"gold_{model}": score if gold else None}  # fmt: skip
        rows.append(row)
    path = root / "evaluation/samples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
