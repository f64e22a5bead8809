"""A judge that is a reward model of somebody else's: the reply with the higher score."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from config.errors import ModelError
from training.judging.judge import Pair
from training.modeling.tokenizer import Prompt
from training.process.device import device

BATCH = 16


class RewardModelJudge:
    """See the module."""

    name = "reward model"
    usd = 0.0

    def __init__(self, path: str) -> None:
        """Load a local folder or a model of the hub. Raises ModelError if it has not one score."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
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
        self._known: dict[str, float] = {}

    def prefer(self, pairs: Sequence[Pair]) -> list[float | None]:
        first = self._scores([(pair.prompt, pair.first) for pair in pairs])
        second = self._scores([(pair.prompt, pair.second) for pair in pairs])
        return [0.5 if a == b else float(a > b) for a, b in zip(first, second, strict=True)]

    @torch.no_grad()
    def _scores(self, replies: Sequence[tuple[Prompt, str]]) -> list[float]:
        texts = [self._rendered(prompt, reply) for prompt, reply in replies]
        new = sorted({text for text in texts if text not in self._known}, key=len)
        longest = self._model.config.max_position_embeddings
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            inputs = self._tokenizer(
                batch, padding=True, truncation=True, max_length=longest, return_tensors="pt",
                add_special_tokens=False,
            )  # fmt: skip
            scores = self._model(**inputs.to(self._model.device)).logits[:, 0].float().tolist()
            self._known |= dict(zip(batch, scores, strict=True))
        return [self._known[text] for text in texts]

    def _rendered(self, prompt: Prompt, reply: str) -> str:
        """By the model's own chat template, or one after the other where it has none."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        answered = [*turns, {"role": "assistant", "content": reply}]
        if self._tokenizer.chat_template is not None:
            return str(self._tokenizer.apply_chat_template(answered, tokenize=False))
        return "\n\n".join(turn["content"] for turn in answered) + self._tokenizer.eos_token
