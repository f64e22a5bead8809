"""A run's final model for export: merged weights, and a tokenizer whose chat template renders prompts as in
training.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.load import load
from config.schema import Params
from training.inference.trained_models import TrainedModels
from training.modeling.adapters import lora_layers, merge
from training.modeling.tokenizer import PLAIN_TEMPLATE, Prompt, encode_prompts, end_of_turn
from training.preparation.prompts import held_out_prompts

SINGLE_PROMPTS = "this model was trained on single prompts: send one message, of the role user"


class Aligned(NamedTuple):
    """The parts of an export."""

    params: Params
    models: TrainedModels
    policy: PreTrainedModel
    """Merged weights in float32."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer with its chat template."""
    prompts: list[Prompt]
    """Held-out prompts."""


def load_aligned(folder: Path) -> Aligned:
    """Load the aligned model of the run in `folder`. Raises ModelError if it is missing or damaged."""
    params = load(folder / "params.yaml")
    models = TrainedModels(folder)
    policy = models.policy
    policy = (merge(policy) if lora_layers(policy) else policy).float()
    prompts = held_out_prompts(folder, params, models.tokenizer)
    tokenizer = with_prompts_of_training(models.tokenizer, isinstance(prompts[0], str))
    return Aligned(params, models, policy, tokenizer, prompts)


def with_prompts_of_training(tokenizer: PreTrainedTokenizerBase, is_plain: bool) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template that renders a user's message as a plain prompt was rendered in training, and
    refuses history and system turns. One that was trained on conversations is left as it is.
    """
    if is_plain:
        template = str(tokenizer.init_kwargs.get("prompt_template", PLAIN_TEMPLATE))
        before, after = (json.dumps(part) for part in template.split("{prompt}"))
        starts_with_bos = encode_prompts(tokenizer, ["a"])[0][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = (
            "{% set prompt = messages[0]['content'] %}{% if messages|length != 1 or messages[0]['role'] != "
            f"'user' %}}{{{{ raise_exception({json.dumps(SINGLE_PROMPTS)}) }}}}{{% endif %}}"
            + ("{{ bos_token }}" if starts_with_bos else "")
            + f"{{{{ {before} }}}}{{{{ prompt }}}}{{{{ {after} }}}}"
        )
    return tokenizer


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a reply: EOS, and the chat template's end of a turn."""
    end = end_of_turn(tokenizer) or tokenizer.eos_token
    return list(dict.fromkeys([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)]))


def as_messages(prompt: Prompt) -> Sequence[dict[str, str]]:
    """A prompt as the messages of a chat."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
