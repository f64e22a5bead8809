"""The embedding judge on an encoder made here, and the reward-model judge on a model made here."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForSequenceClassification

from config.errors import ModelError
from tests.training.support.tiny import tokenizer
from training.judging.embedding import EmbeddingJudge
from training.judging.judge import ByScore, Pair, verdicts
from training.judging.reward_model import RewardModelJudge
from training.modeling.tokenizer import Prompt

WORDS = ("we", "will", "replace", "it", "refund", "the", "no", "sorry")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    words = tokenizer()
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, **sizes)
    BertModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def pairs(count: int, seed: int) -> list[Pair]:
    """Whoever says refund is preferred; both replies are as long."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        rest = " ".join(rng.choices(WORDS[:3], k=4))
        result.append(Pair(rng.choice(WORDS), f"{rest} refund", f"{rest} sorry "))
    return result


def test_the_head_learns_what_people_prefer_and_has_no_favourite_place(encoder: Path) -> None:
    judge = EmbeddingJudge(encoder)
    judge.train(pairs(60, seed=1))
    result = verdicts(judge, pairs(40, seed=2), 1)
    assert sum(result.preferences) / 40 > 0.9
    assert (result.flips, result.unusable) == (0, 0)
    assert judge.prefer([Pair("we", "it", "it")]) == [0.5]


def test_a_folder_without_an_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rlhf fetch minilm"):
        EmbeddingJudge(tmp_path)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_reward_model_prefers_the_higher_score(tmp_path: Path, labels: int) -> None:
    words = tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_labels=labels, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    if labels == 3:
        with pytest.raises(ModelError, match="has 3 labels"):
            RewardModelJudge(str(tmp_path))
        return
    judge = RewardModelJudge(str(tmp_path))
    result = verdicts(judge, pairs(20, seed=1), 1)
    assert (result.flips, result.unusable) == (0, 0)
    assert judge.prefer([Pair("we", "it", "it")]) == [0.5]
    judge._model.config.max_position_embeddings = 16
    prompt = "the kettle is broken and the lid is gone " * 8
    first, second = judge.scores([prompt, prompt], ["we send a new one", "it is not our fault"])
    assert first != second, "of a pair that is too long the reply is kept"


def test_a_reply_is_scored_once_in_whatever_place_it_stands() -> None:
    class Counting(ByScore):
        scored: ClassVar[list[str]] = []

        def scores(self, prompts: Sequence[Prompt], replies: Sequence[str]) -> list[float]:
            self.scored.extend(replies)
            return [float(len(reply)) for reply in replies]

    result = verdicts(Counting(), [Pair("p", "longer", "short"), Pair("p", "longer", "longer")], 1)
    assert (result.preferences, result.flips) == ([1.0, 0.5], 0)
    assert sorted(Counting.scored) == ["longer", "short"]


def test_a_pickled_judge_is_one_line(tmp_path: Path) -> None:
    """Its weights could run code when they are read."""
    tokenizer().save_pretrained(tmp_path)
    config = LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_labels=1)  # fmt: skip
    config.save_pretrained(tmp_path)
    torch.save({"score.weight": Path()}, tmp_path / "pytorch_model.bin")
    for judge in (lambda: RewardModelJudge(str(tmp_path)), lambda: EmbeddingJudge(tmp_path)):
        with pytest.raises(ModelError, match="safetensors") as raised:
            judge()
        assert "\n" not in str(raised.value)
