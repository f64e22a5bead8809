"""A phase that runs a model runs it in the compute type, and its time is written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.support.tiny import params, policy, reward_model
from training.process.usage import Work
from training.rl.phases import in_phase


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_phase_with_a_model_computes_in_the_compute_type_and_any_other_is_left_alone(dtype: str) -> None:
    timed: list[tuple[str, int]] = []

    @contextmanager
    def phase(name: str, step: int) -> Iterator[Work]:
        timed.append((name, step))
        yield Work()

    stage: Any = SimpleNamespace(
        params=params(model={"dtype": dtype}), meter=SimpleNamespace(phase=phase), torch_device=torch.device("cpu")
    )
    seen = {}
    for name, models in {"rollout": (policy(), None), "score": (reward_model(),), "update": ()}.items():
        with in_phase(stage, 7, name, *models):
            seen[name] = torch.is_autocast_enabled("cpu")
    assert seen == {name: name != "update" and dtype == "bf16" for name in seen}
    assert timed == [(name, 7) for name in seen]
    assert not torch.is_autocast_enabled("cpu")
