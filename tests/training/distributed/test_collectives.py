"""Several processes give the result of one, and can be exchanged for one on the way."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from config.errors import EnvironmentFault
from training.distributed import collectives

Project = Callable[..., Path]
NOISE = ("seconds", "first_ratio_error", "grad_norm", "kl_error", "policy_loss", "value_loss", "approx_kl")
"""Curves that are time, or so near zero in a tiny run that only their absolute error means something."""


def largest_difference(one: Path, other: Path) -> float:
    """Of two models' weights."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 8))
def test_shares_have_every_row_once_and_totals_that_differ_by_one_row_at_most(costs: list[int], parts: int) -> None:
    result = collectives.balanced_partition(costs, parts)
    assert sorted(i for share in result for i in share) == list(range(len(costs)))
    totals = [sum(costs[i] for i in share) for share in result]
    assert max(totals) - min(totals) <= max(costs, default=0)
    assert all(share == sorted(share) for share in result)


def test_one_process_does_everything_in_its_order() -> None:
    def tagged(size: int, rows: Sequence[list[int]], tags: Sequence[str]) -> list[str]:
        return [f"{tag}{len(row) * size}" for row, tag in zip(rows, tags, strict=True)]

    assert collectives.map_across_ranks(lambda work: work(2), tagged, [[1], [1, 2, 3], [1, 2]], "abc") == [
        "a2",
        "b6",
        "c4",
    ]
    assert collectives.local_indices([5, 1, 9]) == [0, 1, 2]
    assert (collectives.all_reduce_sum([2.0, 3.0]), collectives.all_reduce_max(4.0)) == ([2.0, 3.0], 4.0)


def test_more_processes_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(
        EnvironmentFault, match=r"where\.ppo\.processes=2 needs a GPU for each process, this machine has 1\."
    ):
        collectives.join("ppo", torch.device("cuda"))
