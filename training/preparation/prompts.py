"""Prompts that leave room for a response in the model's context."""

import logging
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import jsonl
from config.errors import DataError
from config.schema import Params
from training.modeling.tokenizer import Prompt, encode_prompts
from training.preparation.tokens import Rows, TokenTable
from training.process.stage import Stage

logger = logging.getLogger(__name__)


class Encoded(NamedTuple):
    prompt: Prompt
    tokens: list[int]


def fitting_prompts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, room: int) -> list[Encoded]:
    """The prompts of at most `room` tokens: the model's context less the longest response."""
    encoded = encode_prompts(tokenizer, prompts)
    return [Encoded(prompt, tokens) for prompt, tokens in zip(prompts, encoded, strict=True) if len(tokens) <= room]


def require_prompts(fitting: Sized, place: str, room: int, section: str) -> None:
    """Raise DataError if no prompt of `place` leaves room for `section`'s max_new_tokens."""
    if not len(fitting):
        raise DataError(
            f"{place} has no prompt of at most {room} tokens (model.context_length - "
            f"{section}.max_new_tokens). Change either in params.yaml."
        )


def held_out_prompts(folder: Path, params: Params, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The first `evaluate.prompts` held-out prompts below `folder` that leave room for a response.

    Raises DataError if there is none.
    """
    path = folder / "data/prepared/prompts/test.jsonl"
    room = params.model.context_length - params.evaluate.max_new_tokens
    fitting = fitting_prompts([row["prompt"] for row in jsonl.plain(path)], tokenizer, room)
    require_prompts(fitting, str(path), room, "evaluate")
    return [encoded.prompt for encoded in fitting[: params.evaluate.prompts]]


def read_prompts(stage: Stage) -> Rows[list[int]]:
    """Tokenised training prompts that leave room for the stage's max_new_tokens.

    Raises DataError if none does.
    """
    path = stage.root / "data/prepared/prompts/train.arrow"
    table = TokenTable(path)
    room = stage.params.model.context_length - stage.params.section(stage.name).max_new_tokens
    places = np.flatnonzero(table.lengths("prompt_ids") <= room)
    require_prompts(places, str(path), room, stage.name)
    if len(places) < len(table):
        logger.info(
            "%d of %d prompts are longer than %d tokens and are left out", len(table) - len(places), len(table), room
        )
    return Rows(places, lambda place: table.row(place)["prompt_ids"])
