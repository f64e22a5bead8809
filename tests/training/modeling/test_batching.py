import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from training.modeling.batching import LengthBuckets, pad_right, token_budget_batches

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def buckets(rows: int, batch_size: int, seed: int = 3, epoch: int = 0) -> tuple[list[int], list[int]]:
    """Lengths of the rows and the order in which they are visited."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rows)]
    sampler = LengthBuckets(lengths, batch_size, seed)
    sampler.set_epoch(epoch)
    return lengths, list(sampler)


@given(st.integers(1, 300), st.integers(1, 32), st.integers(0, 5))
def test_every_row_is_visited_once_an_epoch(rows: int, batch_size: int, epoch: int) -> None:
    _, order = buckets(rows, batch_size, epoch=epoch)
    assert sorted(order) == list(range(rows))


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    assert buckets(100, 8) == buckets(100, 8)
    assert buckets(100, 8)[1] != buckets(100, 8, epoch=1)[1]
    lengths = list(range(100))
    assert list(LengthBuckets(lengths, 8, seed=1)) != list(LengthBuckets(lengths, 8, seed=2))


def test_a_batch_holds_rows_of_like_length() -> None:
    lengths, order = buckets(3203, 32)
    spread = [
        max(batch) - min(batch) for batch in ([lengths[i] for i in order[k : k + 32]] for k in range(0, 3200, 32))
    ]
    assert sum(spread) / len(spread) < 5  # of 100 lengths; random batches spread over 94


def test_the_batches_of_two_epochs_hold_other_rows() -> None:
    first, second = (buckets(3200, 32, epoch=epoch)[1] for epoch in (0, 1))
    batches = [{frozenset(order[k : k + 32]) for k in range(0, 3200, 32)} for order in (first, second)]
    assert not batches[0] & batches[1]


def test_batches_come_in_random_order_of_length() -> None:
    lengths, order = buckets(3200, 32)
    means = torch.tensor([sum(lengths[i] for i in order[k : k + 32]) / 32 for k in range(0, 1600, 32)])
    assert abs(float(torch.corrcoef(torch.stack([means, torch.arange(50.0)]))[0, 1])) < 0.5


def test_a_short_batch_comes_last_so_that_it_shifts_no_other() -> None:
    lengths, order = buckets(101, 10)
    spread = [
        max(batch) - min(batch) for batch in ([lengths[i] for i in order[k : k + 10]] for k in range(0, 100, 10))
    ]
    assert max(spread) < 30
    assert lengths[order[100]] == max(lengths)


@given(LENGTHS, st.integers(1, 200))
def test_every_row_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_budget_batches_by_hand() -> None:
    assert token_budget_batches([3, 9, 4, 4, 1], 10) == [[1], [2, 3], [0, 4]]
    assert token_budget_batches([30, 2], 10) == [[0], [1]]
    assert token_budget_batches([2, 2, 2], 6) == [[0, 1, 2]]


def test_padding_fills_the_right() -> None:
    assert pad_right([[5, 6, 7], [8]], 0).tolist() == [[5, 6, 7], [8, 0, 0]]


def test_fillers_complete_the_last_batch_and_move_no_row() -> None:
    lengths = [5, 3, 9, 4, 8, 2, 7]
    plain, filled = (list(LengthBuckets(lengths, 3, seed=1)), LengthBuckets(lengths, 3, seed=1, filler=7))
    assert list(filled) == [*plain, 7, 7]
    assert len(filled) == 9
    assert list(LengthBuckets(lengths[:6], 3, seed=1, filler=6)) == list(LengthBuckets(lengths[:6], 3, seed=1))
