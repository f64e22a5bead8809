"""Stage `evaluate`: base, SFT and aligned model, and the student if there is one, answer the same held-out prompts and
are compared.

data/prepared/prompts/test.jsonl, models/{sft,reward,<align.method>,distill} -> metrics/evaluate.json,
plots/evaluate.csv, evaluation/samples.jsonl
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.schema import Params
from training.evaluation.comparison import (
    distinct_n,
    gain,
    gain_at_equal_length,
    gain_kept,
    reward_hacking,
    score_judge,
    win_rate,
)
from training.judging.verdict import Judged, judged
from training.modeling.models import autocast, base_model, load_policy, load_reward_model
from training.modeling.scoring import score
from training.modeling.sequences import sequence_logprobs
from training.modeling.tokenizer import Prompt, decode_response, encode_prompts, load_tokenizer, prompt_text
from training.preparation.prompts import held_out_prompts
from training.process.artifacts import write_csv, write_json, write_jsonl
from training.process.checkpoint import restoring
from training.process.run import run_stage
from training.process.stage import Stage
from training.rewards.function import function_scores, is_function
from training.rollout.engine import Limits, sampling_noise
from training.rollout.static import generate
from training.worlds.helpdesk import criteria, gold_score, known_world
from training.worlds.world import World

SECTIONS = ("seed", "model", "align", "distill", "evaluate", "data.source")


class Answers(NamedTuple):
    """One model's replies to the held-out prompts, in order."""

    texts: list[str]
    lengths: list[int]
    """Tokens, the end-of-sequence token included."""
    ended: list[bool]
    rewards: list[float]
    golds: list[float] | None
    kl: list[float]
    """Nats per response from the SFT model."""
    right_items: list[bool] | None = None
    """Whether each reply names the item of its prompt and no other, in a helpdesk world."""


def models(params: Params) -> tuple[str, ...]:
    """The models compared, always in this order."""
    return ("base", "sft", "aligned", *(("student",) if params.distill is not None else ()))


def inputs(params: Params) -> tuple[str, ...]:
    return (
        "data/prepared/preference",
        "data/prepared/prompts/test.jsonl",
        "data/tokenizer",
        "models/sft",
        "models/reward",
        f"models/{params.align.method}",
        *(("models/distill",) if params.distill is not None else ()),
    )


INPUTS = inputs


def evaluate(stage: Stage) -> None:
    settings = stage.params.evaluate
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = held_out_prompts(stage.root, stage.params, tokenizer)
    world = known_world(stage.params.data.source, map(prompt_text, prompts))
    answers, names = answers_so_far(stage), models(stage.params)
    for step, name in enumerate(names, start=1):
        if name not in answers:
            answers[name] = answer(stage, name, step, prompts, tokenizer, world)
            stage.log(
                step, {f"{name}_{key}": value for key, value in describe(answers[name]).items() if value is not None}
            )
            save_answers(stage, step, answers)
            stage.stop_if_requested()
    verdict = None
    if settings.judge is not None:
        with stage.meter.phase("judge", len(names)) as work:
            verdict = judged(
                stage.root, stage.params, prompts, answers["aligned"].texts, answers["sft"].texts, work.pay,
                stop=stage.stop_if_requested,
            )  # fmt: skip
    stage.check_params()
    with stage.meter.phase("compare", len(names)):
        metrics = compare(answers, settings.confidence, stage.params.seed, verdict)
        write_json(stage.root / "metrics/evaluate.json", metrics)
        table = [
            [name, key, value] for name in names for key, value in describe(answers[name]).items() if value is not None
        ]
        write_csv(stage.root / "plots/evaluate.csv", ("model", "metric", "value"), table)
        write_jsonl(
            stage.root / "evaluation/samples.jsonl",
            samples(prompts[: settings.samples], answers, verdict and verdict.preferences),
        )
    stage.finish("metrics/evaluate.json", "plots/evaluate.csv", "evaluation/samples.jsonl")


def save_answers(stage: Stage, step: int, answers: dict[str, Answers]) -> None:
    """Checkpoint the replies so far: a resumed evaluation does not sample them again."""
    with stage.checkpoints.saving(step) as folder:
        content = {name: model_answers._asdict() for name, model_answers in answers.items()}
        (folder / "answers.json").write_text(json.dumps(content), encoding="utf-8")


def answers_so_far(stage: Stage) -> dict[str, Answers]:
    """The answers in the newest checkpoint, none if there is none.

    Raises CheckpointError if it is of another version.
    """
    checkpoint = stage.checkpoints.latest()
    if checkpoint is None:
        return {}
    with restoring(checkpoint.path):
        content = json.loads((checkpoint.path / "answers.json").read_text(encoding="utf-8"))
        answers = {name: Answers(**saved) for name, saved in content.items()}
    stage.resumed(checkpoint.step)
    return answers


def load_model(stage: Stage, name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """One of `models`, in evaluation mode.

    Raises ModelError if its folder is missing, damaged or of another vocabulary.
    """
    params = stage.params
    if name == "base":
        model = base_model(params.model, tokenizer, params.seed)
    else:
        folder = {"aligned": params.align.method, "student": "distill"}.get(name, name)
        model = load_policy(stage.root / "models" / folder, params.model, tokenizer)
    return model.to(stage.torch_device).eval()


def answer(
    stage: Stage, name: str, step: int, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, world: World | None
) -> Answers:
    """Sample a reply to every prompt, with the same random numbers for every model, and score it."""
    settings = stage.params.evaluate
    budget_tokens = settings.batch_size * stage.params.model.context_length
    encoded = encode_prompts(tokenizer, prompts)
    model = load_model(stage, name, tokenizer)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    noise_BT = (
        sampling_noise(len(prompts), settings.max_new_tokens, stage.params.seed) if settings.temperature > 0 else None
    )
    precision = autocast(stage.params.model, model.device)
    with stage.meter.phase("generate", step) as work, precision:
        rollout = generate(model, encoded, noise_BT, settings.temperature, limits, settings.batch_size)
        work.add(sum(map(len, encoded)) + sum(map(len, rollout.responses)), len(prompts))
    sequences = [[*prompt, *response] for prompt, response in zip(encoded, rollout.responses, strict=True)]
    prompt_lengths = [len(prompt) for prompt in encoded]
    texts = [decode_response(tokenizer, response) for response in rollout.responses]
    with stage.meter.phase("score", step) as work, precision:
        rewards = (
            function_scores(stage.root, prompts, texts)
            if is_function(stage.root / "models/reward")
            else reward_scores(stage, tokenizer, sequences, budget_tokens, model.device)
        )
        # KL of the sampling policy; greedy replies have no distribution of their own
        temperature = settings.temperature or 1.0
        logps = sequence_logprobs(model, sequences, prompt_lengths, temperature, budget_tokens)
        reference = logps
        if name != "sft":
            reference = sequence_logprobs(
                load_model(stage, "sft", tokenizer), sequences, prompt_lengths, temperature, budget_tokens
            )
        work.add((2 if name == "sft" else 3) * sum(map(len, sequences)), len(prompts))
    pairs = [(prompt_text(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]
    return Answers(
        texts=texts,
        lengths=[len(response) for response in rollout.responses],
        ended=[response[-1] == limits.eos for response in rollout.responses],
        rewards=rewards,
        golds=[gold_score(*pair, world) for pair in pairs] if world else None,
        kl=[float((a - b).sum()) for a, b in zip(logps, reference, strict=True)],
        right_items=[criteria(*pair, world)["item"] for pair in pairs] if world else None,
    )


def reward_scores(
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[list[int]],
    budget_tokens: int,
    device: torch.device,
) -> list[float]:
    """Scores of the reward model, which is loaded only meanwhile: at most two models are in memory."""
    reward_model = load_reward_model(stage.root / "models/reward", stage.params.model, tokenizer).to(device).eval()
    scores: list[float] = score(reward_model, sequences, budget_tokens).tolist()
    return scores


def describe(answers: Answers) -> dict[str, float | None]:
    """Means over the prompts."""
    return {
        "gold": _mean(answers.golds) if answers.golds is not None else None,
        "reward": _mean(answers.rewards),
        "length": _mean(answers.lengths),
        "eos_rate": _mean(answers.ended),
        "kl": _mean(answers.kl),
        "distinct_1": distinct_n(answers.texts, 1),
        "distinct_2": distinct_n(answers.texts, 2),
    }


def compare(
    answers: dict[str, Answers], confidence: float, seed: int, verdict: Judged | None = None
) -> dict[str, Any]:
    """metrics/evaluate.json: aligned against SFT, the student against aligned, and each model alone; with what the
    judge said.
    """
    sft, aligned = answers["sft"], answers["aligned"]
    metrics: dict[str, Any] = {f"gold_{name}": describe(answers[name])["gold"] for name in answers}
    for name, side in (("right_item_rate", aligned), ("right_item_rate_sft", sft)):
        metrics[name] = None if side.right_items is None else _mean(side.right_items)
    wins = {"reward": (aligned.rewards, sft.rewards), "gold": (aligned.golds, sft.golds)}
    for kind, (aligned_wins, sft_wins) in wins.items():
        rate = (
            win_rate(score_judge(aligned_wins, sft_wins), len(aligned_wins), confidence, seed)
            if aligned_wins is not None and sft_wins is not None
            else None
        )
        metrics |= {
            f"win_rate_{kind}": rate and rate.rate,
            f"win_rate_{kind}_low": rate and rate.low,
            f"win_rate_{kind}_high": rate and rate.high,
            f"ties_{kind}": rate and rate.ties,
        }
    proxy = gain(aligned.rewards, sft.rewards, confidence)
    gold = gain(aligned.golds, sft.golds, confidence) if aligned.golds is not None and sft.golds is not None else None
    trusted = gold
    if trusted is None and verdict is not None and verdict.preferences is not None:
        preferred = [answer for answer in verdict.preferences if answer is not None]
        trusted = gain(preferred, [0.5] * len(preferred), confidence)
    equal_length = gain_at_equal_length(aligned.rewards, sft.rewards, aligned.lengths, sft.lengths, confidence)
    hacking = reward_hacking(proxy, trusted, equal_length)
    metrics |= {
        "kl": _mean(aligned.kl),
        "reward_hacking": hacking.hacked,
        "reward_hacking_reason": hacking.reason,
        "reward_hacking_prompts_needed": hacking.prompts_needed,
        "gold_gain": gold and gold.mean,
        "gold_gain_low": gold and gold.low,
        "gold_gain_high": gold and gold.high,
        "reward_gain": proxy.mean,
        "reward_gain_low": proxy.low,
        "reward_gain_high": proxy.high,
        "reward_gain_at_equal_length": equal_length.mean,
        "prompts": len(sft.texts),
        "confidence": confidence,
    }
    if verdict is not None:
        metrics |= verdict.metrics
    if "student" in answers:
        metrics |= compare_student(answers, confidence, seed)
    for name in answers:
        metrics |= {
            f"{key}_{name}": value for key, value in describe(answers[name]).items() if key not in ("gold", "kl")
        }
    return metrics


def compare_student(answers: dict[str, Answers], confidence: float, seed: int) -> dict[str, Any]:
    """Win rate of the student against the aligned model, and the share of its gain over SFT that the student keeps; by
    gold score if there is one, else by reward model.
    """
    student, aligned, sft = (judge_scores(answers[name]) for name in ("student", "aligned", "sft"))
    rate = win_rate(score_judge(student, aligned), len(student), confidence, seed)
    kept = gain_kept(student, aligned, sft, confidence, seed)
    return {
        "win_rate_student": rate.rate,
        "win_rate_student_low": rate.low,
        "win_rate_student_high": rate.high,
        "ties_student": rate.ties,
        "quality_kept": kept and kept.share,
        "quality_kept_low": kept and kept.low,
        "quality_kept_high": kept and kept.high,
        "kl_student": _mean(answers["student"].kl),
    }


def judge_scores(answers: Answers) -> list[float]:
    """Gold scores, or the reward model's if there are none."""
    return answers.rewards if answers.golds is None else answers.golds


def samples(
    prompts: list[Prompt], answers: dict[str, Answers], preferences: Sequence[float | None] | None
) -> list[dict[str, Any]]:
    """Replies side by side, with the judge's preference for the aligned model's to the SFT model's."""
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"prompt": prompt_text(prompt)}
        if not isinstance(prompt, str):
            row["messages"] = prompt
        for name in answers:
            golds = answers[name].golds
            row |= {
                name: answers[name].texts[i],
                f"reward_{name}": answers[name].rewards[i],
                f"gold_{name}": golds[i] if golds else None,
            }
        if preferences is not None:
            row["judge"] = preferences[i]
        rows.append(row)
    return rows


def _mean(values: list[float] | list[int] | list[bool]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(run_stage("evaluate", SECTIONS, INPUTS, evaluate))
