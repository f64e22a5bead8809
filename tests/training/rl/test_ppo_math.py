import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from config.methods.ppo import gae, whiten
from tests.training.support.tiny import padded
from training.rl.ppo_math import (
    adapted_kl_coef,
    explained_variance,
    kl_per_token,
    masked_mean,
    policy_loss,
    sequence_policy_loss,
    token_rewards,
    value_loss,
    weighted_policy_loss,
)

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31)
CHANCES = st.floats(0, 1)


def masked(lengths: list[int]) -> Tensor:
    return padded([[1.0] * length for length in lengths])[1]


def drawn(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- KL and rewards


def test_the_estimate_is_the_log_ratio() -> None:
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_per_token(logprobs, ref_logprobs).tolist() == [0.5, -1.0]


def test_its_mean_over_samples_is_the_kl() -> None:
    policy, reference = (torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double())
    estimate = kl_per_token(policy.log(), reference.log())
    exact = 0.5 * math.log(2.5) + 0.3 * math.log(0.6) + 0.2 * math.log(2 / 3)
    assert float((policy * estimate).sum()) == pytest.approx(exact)


@given(SEEDS)
def test_descending_the_penalty_alone_lowers_the_kl_to_the_reference(seed: int) -> None:
    """Exactly: the expectation over all tokens of a policy that is a table of logits."""
    reference_V = torch.log_softmax(drawn(torch.Size([8]), seed), dim=0)
    logits_V = (reference_V + drawn(torch.Size([8]), seed + 1)).requires_grad_()

    def kl() -> float:
        policy_V = torch.log_softmax(logits_V.detach(), dim=0)
        return float((policy_V.exp() * (policy_V - reference_V)).sum())

    before, mask_VT = kl(), torch.ones(8, 1, dtype=torch.bool)
    for _ in range(800):  # a table with a token that is hardly ever drawn takes 400 to halve it
        policy_V = torch.log_softmax(logits_V, dim=0)
        kl_VT = kl_per_token(policy_V.detach(), reference_V)[:, None]
        reward_V = token_rewards(kl_VT, torch.zeros(8).double(), mask_VT, 1.0)[:, 0]
        surrogate = -(policy_V.detach().exp() * reward_V * policy_V).sum()
        (gradient_V,) = torch.autograd.grad(surrogate, logits_V)
        with torch.no_grad():
            logits_V -= 0.5 * gradient_V
    assert kl() < 0.5 * before


def test_rewards_are_the_penalty_everywhere_and_the_score_once_at_the_last_token() -> None:
    kl_BT, mask_BT = padded([[0.5, -1.0, 2.0], [3.0]])
    kl_BT[1, 1:] = 9.0  # what lies in the padding must not count
    rewards = token_rewards(kl_BT, torch.tensor([10.0, -4.0]), mask_BT, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.1, 9.8], [-4.3, 0.0, 0.0]]))


def test_rewards_have_the_precision_of_the_penalty_whatever_the_scores_have() -> None:
    kl_BT, mask_BT = padded([[0.5, -1.0], [3.0]])
    for dtype in (torch.float64, torch.float32):
        rewards = token_rewards(kl_BT.to(dtype), torch.tensor([10, -4]), mask_BT, 0.5)
        assert rewards.dtype == dtype
        assert rewards.tolist() == [[-0.25, 10.5], [-5.5, 0.0]]


def test_a_response_without_a_token_has_its_score_at_the_first_place() -> None:
    kl_BT, mask_BT = torch.full((1, 3), 2.0), torch.zeros(1, 3, dtype=torch.bool)
    assert token_rewards(kl_BT, torch.tensor([7.0]), mask_BT, 0.5).tolist() == [[7.0, 0.0, 0.0]]


@given(LENGTHS, SEEDS)
def test_zero_kl_leaves_a_reward_at_the_last_token_only(lengths: list[int], seed: int) -> None:
    mask_BT = masked(lengths)
    score_B = drawn(torch.Size([len(lengths)]), seed)
    rewards = token_rewards(torch.zeros_like(mask_BT, dtype=torch.float64), score_B, mask_BT, 0.3)
    assert [int(row.nonzero().squeeze()) for row in rewards] == [length - 1 for length in lengths]
    assert torch.equal(rewards.sum(dim=1), score_B)


# ---------------------------------------------------------------- advantages


def test_gae_by_hand() -> None:
    rewards, mask_BT = padded([[1.0, 0.0, 2.0], [5.0]])
    values, _ = padded([[0.5, 1.0, 1.5], [2.0]])
    values[1, 1:] = 7.0  # what a value model says of padding must not count
    advantages, returns = gae(rewards, values, mask_BT, gamma=0.9, lam=0.5)
    # deltas: 1 + 0.9 * 1 - 0.5 = 1.4; 0 + 0.9 * 1.5 - 1 = 0.35; 2 - 1.5 = 0.5. A_2 = 0.5, A_1 = 0.35 + 0.45 * 0.5, A_0
    # = 1.4 + 0.45 * A_1
    torch.testing.assert_close(advantages, torch.tensor([[1.65875, 0.575, 0.5], [3.0, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.15875, 1.575, 2.0], [5.0, 0.0, 0.0]]))


@given(LENGTHS, SEEDS)
def test_gae_with_lam_and_gamma_one_is_return_minus_value(lengths: list[int], seed: int) -> None:
    mask_BT = masked(lengths)
    rewards, values = drawn(mask_BT.shape, seed) * mask_BT, drawn(mask_BT.shape, seed + 1)
    advantages, returns = gae(rewards, values, mask_BT, gamma=1.0, lam=1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, to_go * mask_BT)
    torch.testing.assert_close(advantages, (to_go - values) * mask_BT)


@given(LENGTHS, SEEDS, CHANCES)
def test_gae_with_lam_zero_is_the_td_error(lengths: list[int], seed: int, gamma: float) -> None:
    mask_BT = masked(lengths)
    rewards, values = drawn(mask_BT.shape, seed) * mask_BT, drawn(mask_BT.shape, seed + 1) * mask_BT
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    advantages, _ = gae(rewards, values, mask_BT, gamma, lam=0.0)
    torch.testing.assert_close(advantages, (rewards + gamma * following - values) * mask_BT)


@given(LENGTHS, SEEDS, CHANCES, CHANCES, st.integers(1, 4))
def test_padding_is_inert_in_gae(lengths: list[int], seed: int, gamma: float, lam: float, wider: int) -> None:
    mask_BT = masked(lengths)
    rewards, values = drawn(mask_BT.shape, seed) * mask_BT, drawn(mask_BT.shape, seed + 1)
    more = torch.ones(len(lengths), wider, dtype=torch.float64)
    widened = gae(
        torch.cat([rewards, 0 * more], 1), torch.cat([values, more], 1), torch.cat([mask_BT, more < 0], 1), gamma, lam
    )
    for narrow, wide in zip(gae(rewards, values, mask_BT, gamma, lam), widened, strict=True):
        assert torch.equal(narrow, wide[:, : narrow.shape[1]])
        assert not wide[:, narrow.shape[1] :].any()


# ---------------------------------------------------------------- whitening


def test_whitening_by_hand() -> None:
    x_BT, mask_BT = padded([[1.0, 2.0, 6.0], [3.0]])
    x_BT[1, 1:] = 100.0
    assert float(masked_mean(x_BT, mask_BT)) == 3.0
    deviation = math.sqrt((4 + 1 + 9 + 0) / 4)
    torch.testing.assert_close(whiten(x_BT, mask_BT), torch.tensor([[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]]) / deviation)
    shifted = torch.tensor([[3 - 2 / deviation, 3 - 1 / deviation, 3 + 3 / deviation], [3.0, 0.0, 0.0]])
    torch.testing.assert_close(whiten(x_BT, mask_BT, shift_mean=False), shifted)


@given(LENGTHS, SEEDS, st.floats(0.1, 100), st.floats(-100, 100))
def test_whitened_values_have_mean_zero_and_variance_one_under_the_mask(
    lengths: list[int], seed: int, scale: float, shift: float
) -> None:
    assume(sum(lengths) > 1)
    mask_BT = masked(lengths)
    values = drawn(mask_BT.shape, seed) * scale + shift
    whitened = whiten(values, mask_BT)
    assert float(whitened[mask_BT].mean()) == pytest.approx(0, abs=1e-6)
    variance = float(values[mask_BT].var(correction=0))
    assert float(whitened[mask_BT].var(correction=0)) == pytest.approx(variance / (variance + 1e-8), abs=1e-3)
    assert not whitened[~mask_BT].any()


@given(LENGTHS, SEEDS)
def test_whitening_without_the_shift_keeps_the_mean(lengths: list[int], seed: int) -> None:
    mask_BT = masked(lengths)
    x_BT = drawn(mask_BT.shape, seed) + 5
    assert float(masked_mean(whiten(x_BT, mask_BT, shift_mean=False), mask_BT)) == pytest.approx(
        float(masked_mean(x_BT, mask_BT))
    )


# ---------------------------------------------------------------- losses


def test_the_policy_loss_takes_the_worse_of_ratio_and_clipped_ratio() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5]).double()
    advantages = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0]).double()
    loss = policy_loss(ratios.log() - 3.0, torch.full_like(ratios, -3.0), advantages, 0.2)
    assert loss.ratio.tolist() == pytest.approx(ratios.tolist())
    assert loss.losses.tolist() == pytest.approx([-2.0, -2.4, 3.0, -1.0, 1.6])
    assert loss.clipped.tolist() == [False, True, False, False, True]


def test_a_higher_upper_bound_leaves_the_lower_one() -> None:
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5]).double(), torch.tensor([2.0, -2.0, -2.0]).double()
    loss = policy_loss(ratios.log(), torch.zeros_like(ratios), advantages, 0.2, 0.4)
    assert loss.losses.tolist() == pytest.approx([-2.8, 3.0, 1.6])


def test_a_response_has_one_ratio_whose_log_is_the_mean_of_its_tokens() -> None:
    log_ratios = torch.tensor([0.1, 0.3, -0.4]).double().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0]).double()
    loss = sequence_policy_loss(log_ratios, torch.zeros(3).double(), advantages, 0.3, None, [2, 1])
    assert loss.losses.tolist() == pytest.approx([-2 * math.exp(0.2), -2 * math.exp(0.2), 0.7])
    assert loss.clipped.tolist() == [False, False, True]
    assert loss.ratio.tolist() == pytest.approx([math.exp(0.1), math.exp(0.3), math.exp(-0.4)])
    (gradient,) = torch.autograd.grad(loss.losses.sum(), log_ratios)
    # two tokens, each with half of a response's gradient twice; the clipped one has none
    assert gradient.tolist() == pytest.approx([-2 * math.exp(0.2), -2 * math.exp(0.2), 0.0])


def test_a_weighted_token_learns_beyond_the_bound_by_no_more_than_it() -> None:
    logprobs = torch.tensor([0.5, 1.5, 3.0]).double().log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0]).double()
    loss = weighted_policy_loss(logprobs, torch.zeros(3).double(), advantages, 0.4)
    assert loss.losses.tolist() == pytest.approx([-1.0 * math.log(0.5), -2.8 * math.log(1.5), 1.4 * math.log(3)])
    assert loss.clipped.tolist() == [False, True, True]
    (gradient,) = torch.autograd.grad(loss.losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-1.0, -2.8, 1.4])


@given(SEEDS, st.floats(0.05, 0.5))
def test_a_clipped_token_gives_no_policy_gradient_and_any_other_the_vanilla_one(seed: int, cliprange: float) -> None:
    old, advantages = drawn(torch.Size([40]), seed), drawn(torch.Size([40]), seed + 1)
    logprobs = (old + 0.5 * drawn(torch.Size([40]), seed + 2)).requires_grad_()
    loss = policy_loss(logprobs, old, advantages, cliprange)
    (gradient,) = torch.autograd.grad(loss.losses.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.where(loss.clipped, 0.0, -advantages * loss.ratio).detach())
    beyond = torch.where(advantages > 0, loss.ratio > 1 + cliprange, loss.ratio < 1 - cliprange)
    assert torch.equal(loss.clipped, beyond)


def test_the_value_loss_takes_the_larger_error_of_value_and_clipped_value() -> None:
    values, old, returns = (
        torch.tensor([1.0, 3.0, 3.0, 0.9]),
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
        torch.tensor([2.0, 4.0, 1.0, 0.0]),
    )
    loss = value_loss(values, old, returns, 0.5)
    # near the old value: 1, 1.5, 1.5, 0.9
    assert loss.losses.tolist() == pytest.approx([0.5, 0.5 * 2.5**2, 0.5 * 2**2, 0.5 * 0.9**2])
    assert loss.clipped.tolist() == [False, True, False, False]


@given(SEEDS, st.floats(0.05, 0.5))
def test_the_value_loss_is_at_least_half_the_squared_error_and_equal_within_the_clip_range(
    seed: int, cliprange: float
) -> None:
    old, returns, step = (drawn(torch.Size([40]), seed + i) for i in range(3))
    loss = value_loss(old + step, old, returns, cliprange)
    plain = 0.5 * (old + step - returns) ** 2
    assert (loss.losses >= plain - 1e-12).all()
    near = step.abs() <= cliprange
    torch.testing.assert_close(loss.losses[near], plain[near])
    assert not loss.clipped[near].any()


# ---------------------------------------------------------------- controller and report


def test_the_adaptive_coefficient_moves_towards_the_target_by_at_most_a_fifth() -> None:
    assert adapted_kl_coef(0.5, kl=6.0, target=6.0, horizon=1000, episodes=100) == 0.5
    assert adapted_kl_coef(0.5, kl=6.6, target=6.0, horizon=1000, episodes=100) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert adapted_kl_coef(0.5, kl=60.0, target=6.0, horizon=1000, episodes=100) == pytest.approx(0.5 * 1.02)
    assert adapted_kl_coef(0.5, kl=-1.0, target=6.0, horizon=1000, episodes=100) == pytest.approx(0.5 * 0.98)


def test_a_kl_above_target_for_a_whole_horizon_raises_the_coefficient_by_a_fifth_in_log_space() -> None:
    coefficient = 1.0
    for _ in range(100):
        coefficient = adapted_kl_coef(coefficient, kl=1e3, target=6.0, horizon=10_000, episodes=100)
    assert math.log(coefficient) == pytest.approx(0.2, rel=2e-3)


def test_explained_variance_is_one_for_a_perfect_value_and_zero_for_a_constant_one() -> None:
    returns, mask_BT = padded([[1.0, 2.0, 4.0], [7.0]])
    values = returns.clone()
    values[1, 1:] = 50.0
    assert explained_variance(values, returns, mask_BT) == 1.0
    assert explained_variance(torch.full_like(returns, 3.0), returns, mask_BT) == pytest.approx(0.0, abs=1e-6)
    # errors -1, 0, 0, 1 of variance 1/2; returns of mean 3.5 and variance 5.25
    assert explained_variance(padded([[2.0, 2.0, 4.0], [6.0]])[0], returns, mask_BT) == pytest.approx(1 - 0.5 / 5.25)
    assert explained_variance(values, torch.ones_like(returns), mask_BT) == 0.0
