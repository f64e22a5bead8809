"""Train, test, validation and judge, by prompt: a stable hash decides, so a prompt is never in two splits, and new
rows do not move old ones.
"""

import hashlib

from training.modeling.tokenizer import Prompt

SPLITS = ("train", "test")
JUDGE = "judge"
"""Split of preferences from which only a judge learns, if data.judge_fraction is above 0."""


VALIDATION = "validation"
"""Split of demonstrations and preferences that chooses among checkpoints, if data.validation_fraction is above 0."""


def split_of(prompt: Prompt, test: float, judge: float = 0.0, validation: float = 0.0) -> str:
    """The split of a prompt, for these shares of all prompts: a function of the prompt and the shares alone.

    A conversation is split by its first user message, so that all its turns are in the same split; white space does
    not count, so that a prompt that was indented anew does not leak.
    """
    digest = hashlib.sha256(" ".join(opening(prompt).split()).encode()).digest()
    place = int.from_bytes(digest[:8])
    reached = 0.0
    for split, fraction in (("test", test), (JUDGE, judge), (VALIDATION, validation)):
        reached += fraction
        if place < reached * 2**64:
            return split
    return "train"


def opening(prompt: Prompt) -> str:
    """The text by which a prompt is split: itself, or its first user message."""
    if isinstance(prompt, str):
        return prompt
    return next((message["content"] for message in prompt if message["role"] == "user"), prompt[0]["content"])
