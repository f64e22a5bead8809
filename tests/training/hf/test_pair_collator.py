"""Batches of pairs are TRL's, and so are the tokens that are counted."""

import pytest
import torch
from trl.trainer.reward_trainer import DataCollatorForPreference

from tests.training.support.tiny import random_responses
from training.hf.pair_loss import PairCollator, PairCountingCollator
from training.modeling.batching import shared_length

PAD = 3


@pytest.mark.parametrize("lengths", [[3, 1, 7, 2, 9, 4], [1, 1], [5, 5]])
def test_a_batch_is_trls(lengths: list[int]) -> None:
    replies = random_responses(lengths)
    rows = [
        {"chosen_ids": [8, 9, *a], "rejected_ids": [8, 9, *b]}
        for a, b in zip(replies[::2], replies[1::2], strict=True)
    ]
    expected = DataCollatorForPreference(pad_token_id=PAD)(rows)
    result = PairCollator(PAD)(rows)
    assert set(result) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor)
        assert result[name].dtype == tensor.dtype


def test_a_common_prefix_counts_once_and_a_filler_not_at_all() -> None:
    rows = [
        {"chosen_ids": [5, 6, 7, 2], "rejected_ids": [5, 6, 8, 9, 2]},
        {"chosen_ids": [5, 2], "rejected_ids": [4, 2]},
        {"chosen_ids": [5, 6, 2], "rejected_ids": [5, 6, 2]},
        {"chosen_ids": [2], "rejected_ids": [2]},  # the filler
    ]
    collator = PairCountingCollator(PairCollator(PAD))
    collator(rows)
    expected = sum(
        len(row["chosen_ids"]) + len(row["rejected_ids"]) - shared_length(row["chosen_ids"], row["rejected_ids"])
        for row in rows[:3]
    )
    assert collator.take().tokens == expected
