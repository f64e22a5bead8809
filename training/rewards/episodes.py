"""Scores of a reward function for the episodes of the loop (training/ppo.py).

Shapes: B responses.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config import jsonl
from training.distributed.collectives import map_across_ranks
from training.modeling.tokenizer import Prompt, decode_response
from training.preparation.tokens import Rows
from training.process.stage import Stage
from training.rewards.function import Call, RewardFunction, is_function

REWARD = "models/reward"


class KnownPrompt(NamedTuple):
    """A training prompt with the other columns of its row."""

    prompt: Prompt
    row: Mapping[str, Any]


class EpisodeRewards(NamedTuple):
    """A reward function, and the prompts that the loop samples."""

    function: RewardFunction
    prompts: Sequence[KnownPrompt]
    """The prompts that the loop chooses from, in their order: equal texts may have different rows."""
    tokenizer: PreTrainedTokenizerBase

    def scores(self, places: Sequence[int], responses: Sequence[list[int]]) -> Tensor:
        """The score of each response to the prompt at its place, [B]. Collective: processes share the calls."""
        calls = [
            Call(prompt.prompt, decode_response(self.tokenizer, response), prompt.row)
            for prompt, response in zip((self.prompts[place] for place in places), responses, strict=True)
        ]
        return torch.tensor(
            map_across_ranks(lambda work: work(0), lambda _, __, share: self.function.scores(share), responses, calls)
        )


def episode_rewards(
    stage: Stage, tokenizer: PreTrainedTokenizerBase, prompts: Rows[list[int]]
) -> EpisodeRewards | None:
    """The reward function of models/reward, for these training prompts; None where a model is there."""
    if not is_function(stage.root / REWARD):
        return None
    rows = jsonl.plain(stage.root / "data/prepared/prompts/train.jsonl")
    in_order = [KnownPrompt(row["prompt"], row.get("row", {})) for row in rows]
    return EpisodeRewards(
        RewardFunction(stage.root / REWARD, stage.root), prompts.beside(in_order.__getitem__), tokenizer
    )
