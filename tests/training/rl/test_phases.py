"""A phase that runs a model runs it in the compute type, and its time is written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.tiny import params, policy, reward_model
from training.process.usage import Work
from training.rl.phases import MODELS, in_phase


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_phase_with_a_model_computes_in_the_compute_type_and_any_other_is_left_alone(
    dtype: str,
) -> None:
    timed: list[tuple[str, int]] = []

    @contextmanager
    def phase(name: str, step: int) -> Iterator[Work]:
        timed.append((name, step))
        yield Work()

    models = dict.fromkeys(("policy", "ref_policy"), policy()) | {
        "reward_model": reward_model(),
        "value_model": None,
        "trunk_value_head": None,
    }
    stage: Any = SimpleNamespace(
        params=params(model={"dtype": dtype}),
        meter=SimpleNamespace(phase=phase),
        torch_device=torch.device("cpu"),
    )
    roles: Any = SimpleNamespace(**models)
    seen = {}
    for name in MODELS:
        with in_phase(stage, roles, 7, name):
            seen[name] = torch.is_autocast_enabled("cpu")
    assert seen == {name: bool(MODELS[name]) and dtype == "bf16" for name in seen}
    assert timed == [(name, 7) for name in seen]
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyError, match="reward"), in_phase(stage, roles, 7, "reward"):
        pass  # a misspelt phase would lose autocast and unsharding
