"""Train, test and judge, by prompt: a stable hash decides, so a prompt is never in two splits, and
new rows do not move old ones.
"""

import hashlib

from training.modeling.tokenizer import Prompt

SPLITS = ("train", "test")
JUDGE = "judge"
"""Of preferences, where data.judge_fraction is above 0: a judge learns from them, nothing else."""


def split_of(prompt: Prompt, test_fraction: float, judge_fraction: float = 0.0) -> str:
    """`test` for a share `test_fraction` of all prompts, `judge` for `judge_fraction`, else
    `train`: a function of the prompt alone.

    A conversation is split by its first user message, so that all its turns are in the same split;
    white space does not count, so that a prompt that was indented anew does not leak.
    """
    digest = hashlib.sha256(" ".join(_opening(prompt).split()).encode()).digest()
    place = int.from_bytes(digest[:8])
    if place < test_fraction * 2**64:
        return "test"
    return JUDGE if place < (test_fraction + judge_fraction) * 2**64 else "train"


def _opening(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return next(
        (message["content"] for message in prompt if message["role"] == "user"),
        prompt[0]["content"],
    )
