"""Replies of a finished run's model to prompts, and their KL to its SFT model."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from config.schema import Params
from training.inference.trained_models import TrainedModels
from training.modeling.sequences import sequence_logprobs
from training.modeling.tokenizer import Prompt, decode_response, encode_prompts
from training.process.out_of_memory import halving
from training.rollout.engine import Limits, sampling_noise
from training.rollout.static import generate


class Replies(NamedTuple):
    """One model's replies to the prompts, in order."""

    texts: list[str]
    ended: list[bool]
    kl: list[float]
    """KL to the model's own SFT model, in nats."""

    @property
    def chars(self) -> list[int]:
        return [len(text) for text in self.texts]


def answer(
    trained_models: TrainedModels, prompts: Sequence[Prompt], params: Params, role: Literal["policy", "sft"] = "policy"
) -> Replies:
    """Sample a reply to every prompt, with the random numbers of `seed`, and measure its KL to the SFT model. Raises
    ModelError if a model is missing.
    """
    settings, tokenizer = params.evaluate, trained_models.tokenizer
    encoded = encode_prompts(tokenizer, prompts)
    noise_BT = sampling_noise(len(prompts), settings.max_new_tokens, params.seed) if settings.temperature > 0 else None
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    with trained_models.precision:
        responses = halving(
            lambda size: (
                generate(
                    getattr(trained_models, role), encoded, noise_BT, settings.temperature, limits, size
                ).responses
            ),
            settings.batch_size,
            "evaluate.batch_size",
        )
    sequences = [[*prompt, *response] for prompt, response in zip(encoded, responses, strict=True)]
    prompt_lengths, budget_tokens = (
        [len(ids) for ids in encoded],
        settings.batch_size * trained_models.model.context_length,
    )

    temperature = settings.temperature or 1.0

    def logprobs(name: str) -> list[Tensor]:
        """Log-probs under a model that is released afterwards."""

        def pieces(size: int) -> list[Tensor]:
            model = getattr(trained_models, name)
            with trained_models.precision:
                return sequence_logprobs(model, sequences, prompt_lengths, temperature, size)

        return halving(pieces, budget_tokens, "tokens at once")

    role_logprobs = logprobs(role)
    reference = role_logprobs if role == "sft" else logprobs("sft")
    trained_models.release()
    return Replies(
        [decode_response(tokenizer, response) for response in responses],
        [response[-1] == limits.eos for response in responses],
        [float((a - b).sum()) for a, b in zip(role_logprobs, reference, strict=True)],
    )
