"""The preference pairs of a split, tokenised: the training data of the reward stage and DPO."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from config import jsonl
from config.errors import DataError
from training.modeling.tokenizer import encode_prompts, encode_responses
from training.process.stage import Stage


class Pairs(NamedTuple):
    """Tokenised pairs."""

    rows: list[dict[str, list[int]]]
    """{prompt_ids, chosen_ids, rejected_ids}"""
    too_long: int
    """Pairs left out because a sequence is longer than the stage's max_length."""


def read_pairs(stage: Stage, split: str, tokenizer: PreTrainedTokenizerBase) -> Pairs:
    """The pairs of a split whose two sequences have at most the stage's max_length tokens.

    Raises DataError if none is left.
    """
    limit: int = stage.params.section(stage.name).max_length
    path = stage.root / f"data/prepared/preference/{split}.jsonl"
    found = list(jsonl.plain(path))
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in found])
    replies = [
        encode_responses(tokenizer, [row[side] for row in found]) for side in ("chosen", "rejected")
    ]
    del found
    every = [
        {"prompt_ids": p, "chosen_ids": c, "rejected_ids": r}
        for p, c, r in zip(prompts, *replies, strict=True)
    ]
    rows = [row for row in every if sequence_length(row) <= limit]
    if not every:
        raise DataError(
            f"{path} has no pairs: data.source has no preferences. Name another source."
        )
    if not rows:
        raise DataError(
            f"{path} has no pair that fits in {stage.name}.max_length={limit} ({len(every)} are "
            "longer). Raise it in params.yaml."
        )
    return Pairs(rows, len(every) - len(rows))


def sequence_length(row: dict[str, list[int]]) -> int:
    """Tokens of the longer of a pair's two sequences."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
