"""A judge of frozen sentence embeddings with a logistic head, trained on human pairs that no other stage reads.

Features of a reply r to a prompt p, e their embeddings: e(p) e(r) elementwise, its sum, e(r), and log(1 + characters).
The judge prefers the higher w . features, so that the order of the replies does not matter.

Source: Sun et al. 2025 (arXiv:2502.04357), reward models on frozen embeddings.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from config.errors import ModelError
from training.judging.judge import Pair
from training.modeling.tokenizer import prompt_text

LONGEST = 256
"""Tokens of a text that are embedded: the length that the model was trained with."""
BATCH = 32
PENALTY = 0.1
"""C of the logistic regression: of 0.03 to 3, the best on PandaLM's human votes (cross-validated; 0.03 and 0.3 are as
good).
"""
TIE = 1e-6

Array = NDArray[np.float32]


class EmbeddingJudge:
    """See the module."""

    name = "embedding"
    usd = 0.0

    def __init__(self, folder: Path) -> None:
        """Load the encoder from a local folder. Raises ModelError if there is none."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._encoder = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
        except (OSError, ValueError) as error:
            raise ModelError(
                f"evaluate.judge.path={folder} has no sentence encoder "
                f"({' '.join(str(error).split())[:120]}). Fetch one: rlhf fetch minilm."
            ) from None
        self._cache: dict[str, Array] = {}
        self._weights: Array | None = None

    def train(self, pairs: Sequence[Pair]) -> None:
        """Fit the head to pairs whose first reply people prefer."""
        from sklearn.linear_model import LogisticRegression  # brings pandas, for this judge alone

        difference = self._features(pairs, 0) - self._features(pairs, 1)
        both = np.concatenate([difference, -difference])
        labels = np.repeat([1, 0], len(pairs))
        fit = LogisticRegression(C=PENALTY, fit_intercept=False, max_iter=2000).fit(both, labels)
        self._weights = fit.coef_[0].astype(np.float32)

    def prefer(self, pairs: Sequence[Pair]) -> list[float | None]:
        assert self._weights is not None, "train it first"
        margins = (self._features(pairs, 0) - self._features(pairs, 1)) @ self._weights
        return [0.5 if abs(margin) < TIE else float(margin > 0) for margin in margins]

    def _features(self, pairs: Sequence[Pair], place: int) -> Array:
        texts = [(pair.first, pair.second)[place] for pair in pairs]
        prompts = self._embedded([prompt_text(pair.prompt) for pair in pairs])
        replies = self._embedded(texts)
        product = prompts * replies
        length = np.log1p([len(text) for text in texts]).astype(np.float32)[:, None] / 3
        return np.concatenate([product, product.sum(1, keepdims=True), replies, length], axis=1)

    @torch.no_grad()
    def _embedded(self, texts: Sequence[str]) -> Array:
        """Mean of the last hidden states over the tokens, of length 1; shape [texts, width]."""
        new = sorted({text for text in texts if text not in self._cache}, key=len)
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            inputs = self._tokenizer(
                [text or " " for text in batch], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            hidden_BLD = self._encoder(**inputs).last_hidden_state
            mask_BL1 = inputs["attention_mask"][..., None]
            mean_BD = (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
            unit_BD = torch.nn.functional.normalize(mean_BD, dim=1)
            self._cache |= dict(zip(batch, unit_BD.numpy(), strict=True))
        return np.stack([self._cache[text] for text in texts])
