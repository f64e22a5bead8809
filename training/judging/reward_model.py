"""A published reward model as judge: it prefers the reply with the higher score."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from config.errors import ModelError
from training.judging.judge import ByScore
from training.modeling.tokenizer import Prompt
from training.process.device import device

BATCH = 16


class RewardModelJudge(ByScore):
    """See the module."""

    name = "reward model"

    def __init__(self, path: str) -> None:
        """Load a local folder or a model of the hub. Raises ModelError if it has not one score."""
        super().__init__()
        try:
            # a pair that is too long loses the beginning of its prompt, not the reply that is judged
            self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto", use_safetensors=True)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"evaluate.judge.path={path} cannot be loaded: {' '.join(str(error).split())[:160]}"
            ) from None
        if model.config.num_labels != 1:
            raise ModelError(
                f"evaluate.judge.path={path} has {model.config.num_labels} labels, and a reward "
                "model has one score. Name another."
            )
        self._model = model.to(device()).eval()

    @torch.no_grad()
    def scores(self, prompts: Sequence[Prompt], replies: Sequence[str]) -> list[float]:
        texts = [self._rendered(*answered) for answered in zip(prompts, replies, strict=True)]
        by_length = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        longest, scores = self._model.config.max_position_embeddings, [0.0] * len(texts)
        for start in range(0, len(texts), BATCH):
            places = by_length[start : start + BATCH]
            inputs = self._tokenizer(
                [texts[place] for place in places], padding=True, truncation=True,
                max_length=longest, return_tensors="pt", add_special_tokens=False,
            )  # fmt: skip
            logits_B1 = self._model(**inputs.to(self._model.device)).logits
            for place, score in zip(places, logits_B1[:, 0].float().tolist(), strict=True):
                scores[place] = score
        return scores

    def _rendered(self, prompt: Prompt, reply: str) -> str:
        """Format prompt and reply with the model's chat template, or one after the other if it has none."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        answered = [*turns, {"role": "assistant", "content": reply}]
        if self._tokenizer.chat_template is not None:
            return str(self._tokenizer.apply_chat_template(answered, tokenize=False))
        return "\n\n".join(turn["content"] for turn in answered) + self._tokenizer.eos_token
