"""The folder in which one case of benchmarks/plan_accuracy.py is measured: tokenizer, rows of known
length, models, and what the planner reads.

Every word of the text is one token, so a row of n words has n tokens.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.plan_measurement.cases import ANSWERING, SPECIAL_TOKENS, Case, section
from config.load import write
from training.distributed.model_files import save_adapter
from training.modeling.adapter_base import named_base
from training.modeling.adapters import train_only_adapter
from training.modeling.models import base_model, new_reward_model
from training.modeling.tokenizer import BOS, EOS, PAD, SPARE
from training.process.artifacts import write_json, write_jsonl

TEST_ROWS = 8


def test_rows(case: Case) -> int:
    """Held-out rows: as many as an evaluation asks for."""
    return case.params.evaluate.prompts if case.stage == "evaluate" else TEST_ROWS


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token for each of the words w4, w5, ..."""
    entries = [PAD, BOS, EOS, SPARE, *(f"w{i}" for i in range(SPECIAL_TOKENS, vocab_size))]
    tokenizer = Tokenizer(
        models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=SPARE)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=SPARE,
        prompt_template="{prompt}",
    )


def make(case: Case, folder: Path) -> None:
    """Everything the stage of a case needs, below `folder`."""
    tokenizer = word_tokenizer(case.shape.vocab)
    tokenizer.save_pretrained(folder / "data/tokenizer")
    rows = _rows(case)
    for dataset, of_dataset in rows.items():
        for split, part in (
            ("train", of_dataset[: -test_rows(case)]),
            ("test", of_dataset[-test_rows(case) :]),
        ):
            path = folder / f"data/prepared/{dataset}/{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, part)
    write(case.params, folder / "params.yaml")
    plan_inputs(case, folder, rows)
    _models(case, folder, tokenizer)


def _rows(case: Case) -> dict[str, list[dict[str, str]]]:
    """As many rows as the steps take, lengths evenly spread, so that some batch has the longest."""
    rng = random.Random(case.params.seed)
    count = 4 * section(case).batch_size + test_rows(case)

    def text(tokens: int) -> str:
        return " ".join(
            f"w{rng.randrange(SPECIAL_TOKENS, case.shape.vocab)}" for _ in range(tokens)
        )

    rows: dict[str, list[dict[str, str]]] = {"sft": [], "preference": [], "prompts": []}
    for i in range(count):
        share = (i * 7 % count) / (count - 1)
        prompt, response = (
            round(low + share * (high - low))
            for low, high in (case.prompt_tokens, case.response_tokens)
        )
        rows["sft"].append({"prompt": text(prompt), "completion": text(response - 1)})
        rows["preference"].append(
            {"prompt": text(prompt), "chosen": text(response - 1), "rejected": text(response - 1)}
        )
        rows["prompts"].append({"prompt": text(prompt)})
    return rows


def _base_config(case: Case) -> dict[str, Any]:
    return {
        "model_type": case.shape.family,
        "hidden_size": case.shape.width,
        "num_hidden_layers": case.shape.layers,
        "num_attention_heads": case.shape.heads,
        "num_key_value_heads": case.shape.kv_heads,
        "intermediate_size": case.shape.mlp_width,
        "vocab_size": case.shape.vocab,
        "tie_word_embeddings": case.shape.tied,
        "max_position_embeddings": case.params.model.context_length,
    }


def plan_inputs(
    case: Case, folder: Path, rows: dict[str, list[dict[str, str]]] | None = None
) -> None:
    """metrics/data.json and dvc.lock as the data stage leaves them: the planner takes row counts
    and lengths from there.
    """

    def words(row: dict[str, str]) -> list[int]:
        prompt = len(row["prompt"].split())
        replies = [len(text.split()) + 1 for key, text in row.items() if key != "prompt"]
        return [prompt + reply for reply in replies] or [prompt]

    rows = rows or _rows(case)
    (folder / "base").mkdir(exist_ok=True)
    if not (folder / "base" / "config.json").exists():
        write_json(folder / "base" / "config.json", _base_config(case))
    found: dict[str, Any] = {
        "bayes_accuracy": None,
        "baseline_longer_wins": 0.5,
        "baseline_bow": 0.5,
    }
    for dataset, of_dataset in rows.items():
        lengths = [length for row in of_dataset[: -test_rows(case)] for length in words(row)]
        found |= {
            f"{dataset}_train_rows": len(of_dataset) - test_rows(case),
            f"{dataset}_train_tokens_mean": sum(lengths) / len(lengths),
            f"{dataset}_train_tokens_max": max(lengths),
            f"{dataset}_test_rows": test_rows(case),
        }
        if dataset == "preference":
            pairs = [
                sum(words(row)) - len(row["prompt"].split())
                for row in of_dataset[: -test_rows(case)]
            ]
            found |= {
                "preference_train_pair_tokens_mean": sum(pairs) / len(pairs),
                "preference_train_pair_tokens_max": max(pairs),
            }
    (folder / "metrics").mkdir(exist_ok=True)
    write_json(folder / "metrics/data.json", found)
    lock = {
        "stages": {
            "data": {"params": {"params.yaml": {"data": case.params.data.model_dump(mode="json")}}}
        }
    }
    (folder / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")


def _models(case: Case, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """An SFT and a reward model with random weights: memory and time do not depend on what they
    say.
    """
    policy = base_model(case.model, tokenizer, case.params.seed, trainable=True)
    policy.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    policy.save_pretrained(folder / "models/sft")
    if case.stage == "evaluate":
        policy.save_pretrained(folder / "models" / case.params.align.method)
    if case.stage in ANSWERING:
        _reward_model(case, folder, policy, tokenizer)
    torch.manual_seed(0)


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _reward_model(
    case: Case, folder: Path, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """models/reward: weights of its own, or an adapter on models/sft where the params share one
    base.
    """
    target, lora = folder / "models/reward", case.params.reward.lora
    model = new_reward_model(policy, case.model, tokenizer, case.params.seed)
    if case.stage != "ppo" or lora is None or case.params.ppo.layout != "shared_base":
        model.save_pretrained(target)
        return
    start = folder / "models/sft"
    train_only_adapter(model, lora, "reward", case.params.seed, start)
    save_adapter(target, model, "reward", *named_base(start, target), model.score)
