"""Scores keep the resolution of fp32 where the model is in bf16, however it is loaded and run."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from config.load import write
from tests.training.support.tiny import FAMILIES, params, prompts, reward_model, settings, tokenizer, work
from training import evaluate, reward
from training.inference import trained_models as contest_models
from training.modeling.models import autocast, load_reward_model
from training.modeling.score_head import ScoreHead, new_head, normalised_head
from training.modeling.scoring import raw_pair_scores, raw_scores

LARGE = 40.0
"""Of a score this size bf16 has steps of 1/4."""
SEQUENCES = [[*prompts(2)[1], 9, 14, token, 2] for token in range(4, 68)]
"""Responses that differ in one token."""


def loaded(tmp_path: Path, family: str) -> tuple[torch.nn.Module, Tensor]:
    """A reward model of fp32 weights, whose scores are large, loaded to score in bf16; its own head's weights."""
    trained = reward_model(family=family)
    with torch.no_grad():
        trained.score.weight.mul_(LARGE)
    trained.save_pretrained(tmp_path / "reward")
    in_bf16 = settings(family).model_copy(update={"dtype": "bf16"})
    return (load_reward_model(tmp_path / "reward", in_bf16, tokenizer()).eval(), trained.score.weight.detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("under_autocast", [False, True])
@torch.no_grad()
def test_near_identical_responses_keep_their_difference_in_a_bf16_model(
    family: str, under_autocast: bool, tmp_path: Path
) -> None:
    model, head_1D = loaded(tmp_path, family)
    trunk = {p.dtype for name, p in model.named_parameters() if not name.startswith("score")}
    assert trunk == {torch.bfloat16}
    in_bf16 = settings(family).model_copy(update={"dtype": "bf16"})
    hidden: list[Tensor] = []
    model.score.register_forward_pre_hook(lambda _, given: hidden.append(given[0][0]))
    with autocast(in_bf16, torch.device("cpu")) if under_autocast else nullcontext():
        scores = raw_scores(model, SEQUENCES, 1)
    exact = torch.stack([h.double() @ head_1D[0].double() for h in hidden])
    assert float(exact.abs().max()) > LARGE / 4
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=2e-4)
    near = (exact[:, None] - exact[None]).abs()
    assert bool(((near > 1e-3) & (near < 0.1)).any())  # in bf16 they would tie, or stand apart


@torch.no_grad()
def test_a_trainers_forward_scores_in_fp32_under_autocast() -> None:
    model = reward_model()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=torch.tensor([SEQUENCES[0]])).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_gradients_reach_head_and_trunk_through_it() -> None:
    head, hidden_ND = ScoreHead(8, bias=True), torch.randn(3, 8, dtype=torch.bfloat16)
    hidden_ND.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        said = head(hidden_ND)
    said.sum().backward()
    assert head.weight.grad is not None
    assert hidden_ND.grad is not None
    torch.testing.assert_close(head.weight.grad[0], hidden_ND.detach().float().sum(dim=0))
    torch.testing.assert_close(hidden_ND.grad[0], head.weight.detach()[0].bfloat16())


def test_a_value_head_on_the_scale_of_rewards_is_in_fp32_too() -> None:
    head = normalised_head(new_head(8, 1, torch.device("cpu")), 0.5, 2.0)
    hidden = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        said = head(hidden)
    assert torch.equal(said, torch.nn.functional.linear(hidden, head.weight, head.bias))


@pytest.mark.parametrize("stage", ["reward", "evaluate", "contest"])
def test_reward_models_are_evaluated_in_the_precision_of_training(
    stage: str, project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*given: object) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return scores(*given)

        return call

    monkeypatch.setattr(reward, "raw_pair_scores", watched(raw_pair_scores))
    monkeypatch.setattr(evaluate, "score", watched(raw_scores))
    monkeypatch.setattr(contest_models, "score", watched(raw_scores))
    root = project("evaluate")
    in_bf16 = params(model={"dtype": "bf16"}, reward={"max_steps": 1})
    write(in_bf16, root / "params.yaml")
    if stage == "contest":
        contest_models.TrainedModels(root).scores(["hello"], ["it is"])
    else:
        work(root, stage)
    assert set(seen) == {(True, torch.bfloat16)}
