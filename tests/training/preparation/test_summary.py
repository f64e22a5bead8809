from typing import Any

import pytest

from training.evaluation.intervals import Proportion
from training.preparation.baselines import ReplyPair
from training.preparation.cleaning import Origin
from training.preparation.formats import Example, Pair
from training.preparation.rows import Row
from training.preparation.summary import (
    duplicate_metrics,
    flat,
    label_balance,
    length_histogram,
    row_counts,
    token_lengths,
)

ORIGIN = Origin("rows.jsonl", "line", 1, "prompt", None)


def rows(*tokens: int, prompt: str = "p", **replies: str) -> list[Row]:
    return [Row({"prompt": prompt, **replies}, (count,)) for count in tokens]


def datasets(**splits: Any) -> dict[str, Any]:
    return {"prompts": {"train": rows(1), "test": rows(2), **splits}}


def test_rows_and_unique_prompts_are_counted_per_split() -> None:
    counts = row_counts(
        datasets(train=[*rows(1, 2, prompt="a b"), *rows(3, prompt="a b"), *rows(4, prompt="c")])
    )
    assert (counts["prompts_train_rows"], counts["prompts_train_unique_prompts"]) == (4, 2)
    assert (counts["prompts_test_rows"], counts["prompts_test_unique_prompts"]) == (1, 1)


def test_lengths_are_those_of_every_sequence() -> None:
    lengths = token_lengths(
        datasets(train=[Row({"prompt": "p"}, (1, 3)), Row({"prompt": "p"}, (5, 11))])
    )
    assert lengths["prompts_train_tokens_mean"] == 5
    assert lengths["prompts_train_tokens_p50"] == 4
    # linear between the last two
    assert lengths["prompts_train_tokens_p95"] == pytest.approx(5 + 0.85 * 6)
    assert lengths["prompts_train_tokens_max"] == 11


def test_lengths_of_pairs_are_those_that_are_read() -> None:
    pairs = [Row({}, (10, 12), 15), Row({}, (20, 20), 32)]
    lengths = token_lengths({"preference": {"train": pairs}})
    assert lengths["preference_train_tokens_mean"] == 15.5
    assert lengths["preference_train_pair_tokens_mean"] == 23.5
    assert lengths["preference_train_pair_tokens_max"] == 32
    assert not [name for name in token_lengths(datasets(train=rows(1))) if "pair" in name]


def test_the_histogram_counts_every_sequence_once_in_bins_of_one_width() -> None:
    table = length_histogram(datasets(train=rows(*range(100)), test=rows(59)))
    assert sum(count for _, split, _, count in table if split == "train") == 100
    # 30 bins of 4 hold 0 to 99
    assert {count for _, split, tokens, count in table if split == "train" and tokens < 96} == {4}
    assert [(tokens, count) for _, split, tokens, count in table if split == "test" and count] == [
        (56, 1)
    ]


def test_label_balance_counts_the_known_positions_only() -> None:
    pairs = {
        "train": [ReplyPair("aa", "a"), ReplyPair("a", "b")],
        "test": [ReplyPair("a", "aaa"), ReplyPair("aa", "a")],
    }
    assert label_balance(pairs, [True, None, False, False]) == {
        "chosen_longer": 2.5 / 4,
        "chosen_first": 1 / 3,
    }
    assert label_balance(pairs, [None])["chosen_first"] is None


def test_duplicates_are_what_was_made_and_not_kept() -> None:
    pair = Pair("a", "b", None)
    examples = [
        Example(ORIGIN, "p", (pair,), ("a",)),
        Example(ORIGIN, "p", (pair,), ("a",)),
        Example(ORIGIN, "p", (Pair("b", "a", None),), ("b",)),
    ]
    kept = {
        "sft": {"train": rows(1, 2)},
        "preference": {"train": rows(1), "test": rows(2)},
        "prompts": {"train": rows(1)},
    }
    assert duplicate_metrics(
        {"sft": examples, "preference": examples, "prompts": examples}, kept
    ) == {
        "sft_duplicates": 1,
        "preference_duplicates": 1,
        "prompts_duplicates": 2,
        "contradictory_pairs": 2,
    }


def test_a_proportion_becomes_three_flat_metrics() -> None:
    assert flat({"bow": Proportion(0.6, 0.5, 0.7)}, "baseline") == {
        "baseline_bow": 0.6,
        "baseline_bow_low": 0.5,
        "baseline_bow_high": 0.7,
    }
