import math

import pytest
import torch

from config.errors import TrainingDiverged
from config.methods.ppo import Ppo
from tests.training.support.tiny import params
from training.rl.divergence import MAX_RATIO, MIN_ENTROPY_NATS, check_rollout, check_update
from training.rl.episodes import Episodes
from training.rl.ppo_math import PolicyLoss, ValueLoss
from training.rl.report import UpdateStatistics, rollout_statistics
from training.rl.roles import Forward

HEALTHY = {
    "score": 0.3,
    "score_std": 1.0,
    "kl": 0.8,
    "kl_error": 0.1,
    "reward": 0.2,
    "value": 0.1,
    "entropy": 2.0,
    "rollout_logprob_gap": 0.01,
}


def settings(**changes: int) -> Ppo:
    return params(ppo=changes).ppo


def updated(ratio: float = 1.0, entropy: float = 2.0, grad_norm: float = 0.5) -> UpdateStatistics:
    """Statistics of an update of one mini-batch of four tokens."""
    statistics, x = UpdateStatistics(), torch.ones(4)
    policy = PolicyLoss(losses=-ratio * x, ratio=ratio * x, clipped=x > 2)
    statistics.add(policy, ValueLoss(x, x > 2), Forward(logprobs=-x, entropy=entropy * x, values=x))
    statistics.step(grad_norm)
    return statistics


def test_a_healthy_rollout_and_update_pass() -> None:
    check_rollout(HEALTHY, settings())
    check_rollout(HEALTHY | {"kl": -0.4}, settings())  # within 5 standard errors of zero
    check_update(updated(), 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["score", "kl", "value"])
def test_a_value_that_is_not_a_number_is_named(name: str, bad: float) -> None:
    with pytest.raises(TrainingDiverged, match=f"ppo {name} is {bad}") as error:
        check_rollout(HEALTHY | {name: bad}, settings())
    assert error.value.exit_code == 3


@pytest.mark.parametrize("score", [0.3, -0.3])
def test_equal_scores_are_named(score: float) -> None:
    rounded = torch.tensor([score, math.nextafter(score, 1.0) + 3e-8] * 8)  # by their last bit
    assert rounded.std() > 0
    for spread in (0.0, float(rounded.std())):
        with pytest.raises(TrainingDiverged, match=rf"all 16 responses have the score {score}"):
            check_rollout(HEALTHY | {"score": score, "score_std": spread}, settings())
    check_rollout(HEALTHY | {"score": score, "score_std": 1e-5}, settings())


@pytest.mark.parametrize("kl_error", [0.1, 0.0])
def test_a_kl_that_samples_of_the_policy_cannot_give_is_named(kl_error: float) -> None:
    with pytest.raises(TrainingDiverged, match=r"mean KL is -0\.600 nats"):
        check_rollout(HEALTHY | {"kl": -0.6, "kl_error": kl_error}, settings())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(TrainingDiverged, match=f"gradient norm is {bad} in update 7"):
        check_update(updated(grad_norm=bad), 7)


def test_an_exploding_ratio_is_named() -> None:
    with pytest.raises(TrainingDiverged, match="ratio of new to old policy is 11 in update 7"):
        check_update(updated(ratio=11.0), 7)
    check_update(updated(ratio=9.0), 7)


def test_a_collapsed_entropy_is_named() -> None:
    with pytest.raises(TrainingDiverged, match="entropy is 9e-05 nats per token in update 7"):
        check_update(updated(entropy=9e-5), 7)
    check_update(updated(entropy=2e-4), 7)


def test_one_episode_an_update_is_not_taken_for_divergence() -> None:
    first = torch.ones(1, 3)
    episode = Episodes([[1, 2, 3, 4]], [1], first > 0, -first, first, first, first)
    statistics = rollout_statistics(episode, -0.9 * first, torch.ones(1), torch.tensor([True]), 0.1)
    check_rollout(statistics | {"rollout_logprob_gap": 0.0}, settings(batch_size=1, num_mini_batches=1))


def test_two_responses_are_enough_to_tell_and_one_is_not() -> None:
    bad = HEALTHY | {"score_std": 0.0}
    with pytest.raises(TrainingDiverged, match="all 2 responses"):
        check_rollout(bad, settings(batch_size=2, num_mini_batches=1))
    with pytest.raises(TrainingDiverged, match="mean KL"):
        check_rollout(HEALTHY | {"kl": -0.6}, settings(batch_size=2, num_mini_batches=1))
    check_rollout(bad | {"kl": -0.6}, settings(batch_size=1, num_mini_batches=1))


def test_a_sampler_that_disagrees_with_the_trainer_is_named() -> None:
    check_rollout(HEALTHY | {"rollout_logprob_gap": 0.2}, settings())
    with pytest.raises(TrainingDiverged, match=r"differ by 5 nats per token, more than 0\.2"):
        check_rollout(HEALTHY | {"rollout_logprob_gap": 5.0}, settings())


def test_a_kl_at_its_bound_passes() -> None:
    check_rollout(HEALTHY | {"kl": -1e-3, "kl_error": 0.0}, settings())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl": math.nan}, "ppo kl is nan: training diverged. Lower ppo.learning_rate in params.yaml."),
        (
            {"score_std": 0.0},
            "all 16 responses have the score 0.3: the reward model cannot tell them apart. Look at "
            "metrics/reward.json and train the reward stage again.",
        ),
        (
            {"kl": -0.6},
            "mean KL is -0.600 nats with a standard error of 0.100, which samples from the policy "
            "cannot give: sampling and scoring disagree. Check ppo.temperature and the tokenizer.",
        ),
    ],
)
def test_what_is_wrong_with_a_rollout_in_words(changes: dict[str, float], said: str) -> None:
    with pytest.raises(TrainingDiverged) as error:
        check_rollout(HEALTHY | changes, settings())
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("kl", "kl_error", "passes"),
    [(-0.5, 0.1, True), (-0.502, 0.1, False), (-0.0009, 0.0, True), (-0.0011, 0.0, False)],
)
def test_chance_takes_a_mean_kl_no_further_than_five_errors_below_zero(
    kl: float, kl_error: float, passes: bool
) -> None:
    try:
        check_rollout(HEALTHY | {"kl": kl, "kl_error": kl_error}, settings())
    except TrainingDiverged:
        assert not passes
    else:
        assert passes


def test_a_ratio_or_entropy_at_its_bound_passes() -> None:
    check_update(updated(ratio=MAX_RATIO), 7)
    least = updated(entropy=1.0)
    least.summary = lambda: {"ratio": 1.0, "entropy": MIN_ENTROPY_NATS}  # type: ignore[assignment,method-assign]
    check_update(least, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"grad_norm": math.inf},
            "the gradient norm is inf in update 3: the step was not taken. Lower "
            "rloo.learning_rate in params.yaml; the last checkpoint is kept.",
        ),
        (
            {"ratio": 11.0},
            "the mean ratio of new to old policy is 11 in update 3: the policy ran away. Lower "
            "rloo.learning_rate, or set rloo.target_kl in params.yaml.",
        ),
        (
            {"entropy": 9e-5},
            "entropy is 9e-05 nats per token in update 3: the policy collapsed to one response. "
            "Raise rloo.kl.coef or lower rloo.learning_rate in params.yaml.",
        ),
    ],
)
def test_what_is_wrong_with_an_update_in_words(changes: dict[str, float], said: str) -> None:
    with pytest.raises(TrainingDiverged) as error:
        check_update(updated(**changes), 3, "rloo")
    assert str(error.value) == said
    with pytest.raises(TrainingDiverged, match="ppo"):
        check_update(updated(**changes), 3)
