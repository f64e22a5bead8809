"""Train and test, by prompt: a stable hash decides, so a prompt is never in two splits, and new
rows do not move old ones.
"""

import hashlib

from training.modeling.tokenizer import Prompt
from training.preparation.cleaning import same_text_key

SPLITS = ("train", "test")


def split_of(prompt: Prompt, test_fraction: float) -> str:
    """`test` for a share `test_fraction` of all prompts, else `train`: a function of the prompt
    alone.

    A conversation is split by its first user message, so that all its turns are in the same split.
    """
    digest = hashlib.sha256(same_text_key(_opening(prompt)).encode()).digest()
    return "test" if int.from_bytes(digest[:8]) < test_fraction * 2**64 else "train"


def _opening(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return next(
        (message["content"] for message in prompt if message["role"] == "user"),
        prompt[0]["content"],
    )
