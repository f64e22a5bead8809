"""A finished run's models, loaded from a folder with the project's layout: the champion's, or the project itself."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.load import read
from config.records import final_stage
from config.sections.model import Model
from training.modeling.models import autocast, load_policy, load_reward_model
from training.modeling.scoring import score
from training.modeling.tokenizer import Prompt, encode_prompts, encode_responses, load_tokenizer, response_text
from training.process import out_of_memory
from training.process.device import device
from training.process.out_of_memory import halving
from training.rewards.function import function_scores, is_function


class TrainedModels:
    """Data, tokenizer and models below `folder`, loading one model at a time. Properties raise ModelError if what they
    need is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # only these two sections: others may have an earlier schema
        content = read(folder / "params.yaml")
        self.model = Model.model_validate(content["model"])
        self.method = str(content["align"]["method"])
        self.final_stage = final_stage(content)
        self.device = device()
        self._held: tuple[str, PreTrainedModel] | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder / "data/tokenizer")

    @property
    def policy(self) -> PreTrainedModel:
        """The run's final model: aligned, or its student."""
        return self._hold(self.final_stage, self._policy)

    @property
    def sft(self) -> PreTrainedModel:
        return self._hold("sft", self._policy)

    @property
    def reward_model(self) -> PreTrainedModel:
        return self._hold(
            "reward", lambda name: load_reward_model(self.folder / "models" / name, self.model, self.tokenizer)
        )

    @property
    def precision(self) -> torch.autocast:
        """Compute in the precision of training."""
        return autocast(self.model, self.device)

    def release(self) -> None:
        """Release the loaded model."""
        self._held = None
        out_of_memory.release()

    def _hold(self, name: str, load: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
        if self._held is None or self._held[0] != name:
            self.release()
            self._held = name, load(name).to(self.device).eval()
        return self._held[1]

    def _policy(self, name: str) -> PreTrainedModel:
        return load_policy(self.folder / "models" / name, self.model, self.tokenizer)

    def metrics(self, stage: str) -> Mapping[str, Any]:
        """metrics/<stage>.json, empty if there is none."""
        path = self.folder / "metrics" / f"{stage}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def scores(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ended: Sequence[bool] | None = None
    ) -> list[float]:
        """Normalised scores of the reward model, or scores of the reward function, one for each prompt and response.
        The model reads as much as fits in its context.

        A response that has not `ended` is read without an end-of-sequence token.
        """
        if is_function(self.folder / "models/reward"):
            return function_scores(self.folder, prompts, texts)
        longest, has_ended = (self.model.context_length, [True] * len(texts) if ended is None else ended)
        responses = [
            ids if has_end else ids[:-1]
            for ids, has_end in zip(encode_responses(self.tokenizer, texts), has_ended, strict=True)
        ]
        encoded = zip(encode_prompts(self.tokenizer, prompts), responses, strict=True)
        sequences = [[*prompt, *response][:longest] for prompt, response in encoded]
        with self.precision:
            return halving(
                lambda size: score(self.reward_model, sequences, size).tolist(), 200 * longest, "tokens scored at once"
            )


def pair_margins(trained_models: TrainedModels, pairs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Score of the chosen minus the rejected reply of every pair."""
    prompts = [pair["prompt"] for pair in pairs]
    chosen, rejected = (
        trained_models.scores(prompts, [response_text(pair[side]) for pair in pairs])
        for side in ("chosen", "rejected")
    )
    return [a - b for a, b in zip(chosen, rejected, strict=True)]
