"""The prompts that a policy answers while it is trained."""

import logging

from transformers import PreTrainedTokenizerBase

from config import jsonl
from config.errors import DataError
from training.modeling.tokenizer import encode_prompts
from training.process.stage import Stage

logger = logging.getLogger(__name__)


def read_prompts(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenised training prompts that leave room for a whole response of the stage's
    max_new_tokens.

    Raises DataError if none does.
    """
    path = stage.root / "data/prepared/prompts/train.jsonl"
    room = stage.params.model.context_length - getattr(stage.params, stage.name).max_new_tokens
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in jsonl.plain(path)])
    fitting = [prompt for prompt in prompts if len(prompt) <= room]
    if not fitting:
        raise DataError(
            f"{path} has no prompt of at most {room} tokens (model.context_length - "
            f"{stage.name}.max_new_tokens). "
            "Change either in params.yaml."
        )
    if len(fitting) < len(prompts):
        logger.info(
            "%d of %d prompts are longer than %d tokens and are left out",
            len(prompts) - len(fitting),
            len(prompts),
            room,
        )
    return fitting
