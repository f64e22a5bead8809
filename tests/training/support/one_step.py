"""One optimizer step of the loop of training/ppo.py, on responses and scores that are given."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import training.ppo as loop
from config.methods.method import Estimator
from config.sections.online import Online
from tests.training.support.tiny import params, tokenizer
from training.process.usage import Meter
from training.rl.report import UpdateStatistics
from training.rl.roles import Roles
from training.rl.state import PpoState
from training.rollout.engine import Rollout


class Stepped(Exception):
    """The step is done."""


def step_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
    roles: Roles,
    settings: Online,
    estimate: Estimator,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    logprobs: Sequence[Tensor],
    score_B: Tensor,
    mini_batch: Sequence[int],
) -> dict[str, float]:
    """Statistics of the step, its gradient left in the roles, whose weights stay as they are.

    Sampling, the tokenizer and the scores are given; everything from there to the gradient is what the loop does, with
    no penalty for a missing end.
    """
    kept: list[UpdateStatistics] = []

    def end(statistics: UpdateStatistics, *_: Any) -> None:
        kept.append(statistics)
        raise Stepped

    settings = settings.model_copy(update={"missing_eos_penalty": 0.0, "score_clip": None})
    given = {
        "load_tokenizer": tokenizer(),
        "read_prompts": list(prompts),
        "load_roles": roles,
        "load_state": PpoState(update=0, episodes=0, kl_coef=settings.kl.coef),
        "choose_prompts": range(len(prompts)),
        "roll_out": Rollout(list(responses), list(logprobs), None),
        "scores": score_B,
        "mini_batches": [list(mini_batch)],
    }
    for name, value in given.items():
        monkeypatch.setattr(loop, name, lambda *_, value=value: value)
    monkeypatch.setattr(loop, "advantages", lambda _: estimate)
    monkeypatch.setattr(roles, "settings", settings)
    monkeypatch.setattr(loop, "check_rollout", lambda *_: None)  # the policy is another by now
    monkeypatch.setattr(loop, "check_update", end)
    monkeypatch.setattr(roles, "step", lambda max_grad_norm: 0.0)
    stage: Any = SimpleNamespace(
        name=settings.method,
        root=Path("nowhere"),
        world_size=1,
        torch_device=torch.device("cpu"),
        params=SimpleNamespace(seed=1, model=params().model, section=lambda _: settings),
        checkpoints=SimpleNamespace(folder=Path("nowhere")),
        meter=Meter(None, "run", 1, "cpu", 1),
    )
    with pytest.raises(Stepped):
        loop.ppo(stage)
    return kept[0].summary()
