"""The estimators by hand, and the losses of RLOO and GRPO against TRL's own trainers on the same batch.

TRL samples nothing here: its trainers are handed the responses and scores, and compute log-probabilities, KL penalty,
advantages, loss and gradient themselves. Ours come from the
loop itself. Where the two differ by intention:

- TRL's RLOO takes one ratio of a whole response and the mean over responses; ours takes the ratio
  of each token, and the mean over tokens.
  With the old policy's weights the gradients differ by a factor (tokens / responses) alone; with responses of one
  token not at all.
- TRL's GRPO adds the KL penalty to the loss, ours to the advantage: compared without one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from config.methods import grpo, ppo, rloo
from config.methods.grpo import Grpo, group_normalised
from config.methods.method import Targets, per_token
from config.methods.ppo import Ppo, gae, whiten
from config.methods.rloo import Rloo, leave_one_out
from tests.training.support.one_step import step_of_the_loop
from tests.training.support.tiny import params, policy, prompts, random_responses, reward_model, tokenizer
from training.rl.ppo_math import masked_mean
from training.rl.roles import Models, Roles

GROUP, KL_COEF = 4, 0.3
PROMPTS = [prompt for prompt in prompts(3) for _ in range(GROUP)]
RAGGED = [5, 1, 9, 3, 7, 2, 2, 6, 4, 8, 1, 5]
SCORES = torch.tensor([0.3, -1.2, 0.9, 0.4, 2.0, 1.5, -0.5, 1.0, -0.1, -0.2, -0.4, 0.7])
MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, True, True]])
REWARDS = torch.tensor([[-0.1, 0.2, 1.0], [0.5, 0.0, 0.0], [-0.3, 2.0, 0.0], [0.0, 0.0, 0.6]])
SCORE = torch.tensor([1.0, 0.6, 2.0, 0.6])
"""What of the rewards is score; the rest is penalty."""


# ---------------------------------------------------------------- by hand


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others_to_the_same_prompt() -> None:
    assert leave_one_out(torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), 3).tolist() == [
        1 - 4,
        2 - 3.5,
        6 - 1.5,
        0,
        0,
        0,
    ]


def test_group_normalised_is_the_distance_from_the_mean_in_deviations() -> None:
    result = group_normalised(torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), 3)
    torch.testing.assert_close(result, torch.tensor([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]) / (7**0.5 + 1e-4))


@given(st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8), st.floats(0.5, 20, width=32))
def test_both_sum_to_zero_over_a_prompt_and_only_one_keeps_the_scale(values: list[float], scale: float) -> None:
    reward_B = torch.tensor(values, dtype=torch.float64)
    for estimator in (leave_one_out, group_normalised):
        torch.testing.assert_close(
            estimator(reward_B, 4).view(2, 4).sum(dim=1), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0
        )
    torch.testing.assert_close(leave_one_out(scale * reward_B, 4), scale * leave_one_out(reward_B, 4))
    if float(reward_B.view(2, 4).std(dim=1).min()) > 0.5:  # far above what is added to the deviation
        torch.testing.assert_close(
            group_normalised(scale * reward_B, 4), group_normalised(reward_B, 4), rtol=1e-3, atol=1e-3
        )


def test_each_token_of_a_response_has_its_advantage_and_padding_none() -> None:
    assert per_token(torch.tensor([1.0, -2.0]), MASK[:2]).tolist() == [[1, 1, 1], [-2, 0, 0]]


def settings(method: str, **changes: Any) -> Any:
    return getattr(params(**{method: changes}), method)


def test_the_rewards_of_a_responses_tokens_add_up_to_what_is_compared() -> None:
    chosen: Rloo = settings("rloo", responses_per_prompt=2, normalise_advantages=False)
    result = rloo.advantages(REWARDS, SCORE, None, MASK, chosen)
    assert result.returns is None
    torch.testing.assert_close(result.advantages, per_token(torch.tensor([0.6, -0.6, 1.1, -1.1]), MASK))
    normalised = rloo.advantages(
        REWARDS, SCORE, None, MASK, chosen.model_copy(update={"normalise_advantages": True})
    ).advantages[:, 0]
    assert float(normalised.mean()) == pytest.approx(0, abs=1e-6)
    assert float(normalised.std()) == pytest.approx(1, abs=1e-3)


def test_grpo_normalises_scores_and_leaves_the_penalty_as_it_is() -> None:
    chosen: Grpo = settings("grpo", responses_per_prompt=2)
    result = grpo.advantages(REWARDS, SCORE, None, MASK, chosen).advantages
    # scores 1.0, 0.6 and 2.0, 0.6; rewards 1.1, 0.5 and 1.7, 0.6: penalties -0.1, 0.1 and 0.3, 0
    deviations = [0.4 / 2**0.5 + 1e-4, 1.4 / 2**0.5 + 1e-4]
    scores = [0.2 / deviations[0], 0.7 / deviations[1]]
    first, second = scores[0] + 0.1, scores[1] - 0.15
    torch.testing.assert_close(result, per_token(torch.tensor([first, -first, second, -second]), MASK))


@given(st.lists(st.floats(-0.125, 0.125, width=32), min_size=8, max_size=8), st.floats(-5, 5, width=32))
def test_the_noise_of_the_penalty_stays_as_small_as_it_is_where_scores_are_equal(
    noise: list[float], score: float
) -> None:
    """Divided by its own deviation it would be an advantage of about 1."""
    chosen: Grpo = settings("grpo", responses_per_prompt=8)
    score_B, mask_BT = torch.full((8,), score), torch.ones(8, 1, dtype=torch.bool)
    reward_BT = (score_B + torch.tensor(noise))[:, None]
    result = grpo.advantages(reward_BT, score_B, None, mask_BT, chosen).advantages
    assert float(result.abs().max()) <= 0.26


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_ppo_whitens_generalised_advantages_and_keeps_returns_as_they_are(whiten_rewards: bool) -> None:
    chosen: Ppo = settings("ppo", gamma=0.9, lam=0.8, whiten_rewards=whiten_rewards)
    values_BT = torch.linspace(-1, 1, 12).view(4, 3)
    result = ppo.advantages(REWARDS, SCORE, values_BT, MASK, chosen)
    reward_BT = whiten(REWARDS, MASK, shift_mean=False) if whiten_rewards else REWARDS
    plain = gae(reward_BT, values_BT, MASK, 0.9, 0.8)
    torch.testing.assert_close(result.returns, plain.returns)
    torch.testing.assert_close(result.advantages, whiten(plain.advantages, MASK))
    assert float(masked_mean(result.advantages, MASK)) == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------- against TRL


class Handed:
    """Mixed into a trainer of TRL: prompts are token ids, responses and scores are given."""

    responses: Sequence[list[int]]

    def _tokenize_prompts(self, given: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return given, None, {}


class HandedRloo(Handed, RLOOTrainer):
    def _generate_single_turn(self, *_: Any) -> list[list[int]]:
        return [list(ids) for ids in self.responses]


class HandedGrpo(Handed, GRPOTrainer):
    def _generate_single_turn(self, *_: Any) -> tuple[list[list[int]], None]:
        return [list(ids) for ids in self.responses], None


def trl_trainer(
    kind: str, folder: Path, responses: Sequence[list[int]], chosen: Rloo | Grpo, beta: float, **theirs: Any
) -> Any:
    """TRL's own, its policy another one than its reference."""
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": len(PROMPTS),
        "num_generations": GROUP,
        "num_iterations": 2,
        "temperature": chosen.temperature,
        "epsilon": chosen.cliprange,
        "beta": 0.0,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_completion_length": max(map(len, responses)),
    }
    if kind == "rloo":
        arguments: Any = RLOOConfig(**common, normalize_advantages=chosen.normalise_advantages)  # type: ignore[union-attr]
    else:
        arguments = GRPOConfig(**{**common, "loss_type": "dapo", "scale_rewards": "group", **theirs})
    trainer = (HandedRloo if kind == "rloo" else HandedGrpo)(
        model=policy(seed=1),
        reward_funcs=lambda completion_ids, **_: SCORES.tolist(),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": ids} for ids in PROMPTS]),
        processing_class=tokenizer(),
    )
    trainer.responses = responses
    if beta:
        trainer.beta, trainer.ref_model = beta, policy(seed=2)
        add_fused_lm_head(trainer.ref_model, temperature=chosen.temperature)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def our_roles(chosen: Rloo | Grpo) -> Roles:
    return Roles(Models(policy(seed=1), policy(seed=2), reward_model(), None, None), chosen)


def moved(model: PreTrainedModel) -> None:
    """Put the policy so far off the one that sampled that ratios are clipped."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def ours(
    monkeypatch: pytest.MonkeyPatch,
    roles: Roles,
    responses: Sequence[list[int]],
    chosen: Rloo | Grpo,
    estimate: Any,
    coef: float,
    is_moved: bool,
) -> tuple[Any, Any]:
    """Advantages [B] and the update's statistics, with the gradient left in the policy; by the loop itself."""
    result: list[Targets] = []

    def kept(*given: Any) -> Targets:
        result.append(estimate(*given))
        if is_moved:
            moved(roles.policy)
        return result[-1]

    chosen = chosen.model_copy(update={"kl": chosen.kl.model_copy(update={"coef": coef}), "micro_batch_tokens": 60})
    sequences = [[*prompt, *response] for prompt, response in zip(PROMPTS, responses, strict=True)]
    logprobs = roles.logprobs(sequences, [len(prompt) for prompt in PROMPTS], 60)
    everything = range(len(PROMPTS))
    statistics = step_of_the_loop(monkeypatch, roles, chosen, kept, PROMPTS, responses, logprobs, SCORES, everything)
    return result[0].advantages[:, 0], statistics


def theirs(trainer: Any, is_moved: bool) -> tuple[Tensor, Tensor]:
    """Advantages [B] and loss, with the gradient left in the model."""
    batch = trainer._generate_and_score_completions([{"prompt": ids} for ids in PROMPTS])
    if is_moved:
        moved(trainer.model)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return batch["advantages"], loss.detach()


def same_gradients(one: PreTrainedModel, other: PreTrainedModel, factor: float = 1.0) -> None:
    """`one`'s gradient of every weight is `factor` times the other's."""
    parameters = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert parameter.grad is not None
        expected = parameters[name].grad
        assert expected is not None
        torch.testing.assert_close(
            parameter.grad, factor * expected, rtol=2e-3, atol=2e-5 * float(expected.abs().max()) + 1e-7, msg=name
        )


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("lengths", "is_moved"), [(RAGGED, False), ([1] * 12, True)])
def test_rloo_learns_what_trls_loss_teaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], is_moved: bool, normalised: bool
) -> None:
    responses = random_responses(lengths)
    chosen: Rloo = settings("rloo", temperature=0.8, responses_per_prompt=GROUP, normalise_advantages=normalised)
    trainer = trl_trainer("rloo", tmp_path, responses, chosen, KL_COEF)
    advantages_B, loss = theirs(trainer, is_moved)
    roles = our_roles(chosen)
    found_B, statistics = ours(monkeypatch, roles, responses, chosen, rloo.advantages, KL_COEF, is_moved)
    torch.testing.assert_close(found_B, advantages_B, rtol=1e-4, atol=1e-4)
    same_gradients(roles.policy, trainer.model, factor=len(lengths) / sum(lengths))
    if is_moved:
        assert 0 < statistics["clip_fraction"] < 1
        assert statistics["policy_loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize(
    ("changes", "theirs_changes"),
    [
        ({}, {}),
        ({"cliprange_high": 0.6}, {"epsilon_high": 0.6}),
        ({"policy_loss": "gspo", "cliprange": 0.01}, {"importance_sampling_level": "sequence", "epsilon": 0.01}),
        ({"policy_loss": "cispo", "cliprange_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
        ({"divide_by_deviation": False}, {"scale_rewards": "none"}),
    ],
    ids=["grpo", "clip-higher", "gspo", "cispo", "dr_grpo"],
)
def test_grpo_learns_what_trls_loss_teaches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_moved: bool,
    changes: dict[str, Any],
    theirs_changes: dict[str, Any],
) -> None:
    responses = random_responses(RAGGED)
    chosen: Grpo = settings("grpo", temperature=0.8, responses_per_prompt=GROUP, **changes)
    trainer = trl_trainer("grpo", tmp_path, responses, chosen, 0.0, **theirs_changes)
    advantages_B, loss = theirs(trainer, is_moved)
    roles = our_roles(chosen)
    found_B, statistics = ours(monkeypatch, roles, responses, chosen, grpo.advantages, 0.0, is_moved)
    torch.testing.assert_close(found_B, advantages_B, rtol=1e-4, atol=1e-4)
    same_gradients(roles.policy, trainer.model)
    assert statistics["policy_loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-5)
    assert (0 < statistics["clip_fraction"] < 1) is is_moved
