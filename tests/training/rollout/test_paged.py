import pytest
import torch
from torch import nn

from config.errors import EnvironmentFault
from tests.training.rollout.test_engine import PAD, PROMPTS, STEPS, UNREACHABLE, frequent_token, policy
from tests.training.support.tiny import FAMILIES
from training.rollout import paged as rollout_paged
from training.rollout import static
from training.rollout.engine import Limits, Rollout, sampling_noise


def paged(family: str, batch_size: int, eos: int, temperature: float = 1.0, greedy: bool = False) -> Rollout:
    noise = None if greedy else sampling_noise(len(PROMPTS), STEPS, 5)
    return rollout_paged.generate(
        policy(family=family), PROMPTS, noise, temperature, Limits(STEPS, eos, PAD), batch_size
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_sample_the_same_responses(family: str) -> None:
    model = policy(family=family)
    eos = frequent_token(model)
    expected = static.generate(
        model, PROMPTS, sampling_noise(len(PROMPTS), STEPS, 5), 0.7, Limits(STEPS, eos, PAD), 12
    )
    assert len({len(response) for response in expected.responses}) >= 2
    for batch_size in (12, 3):  # with 3 side by side the places of responses that ended are taken by others
        result = paged(family, batch_size, eos, temperature=0.7)
        assert result.responses == expected.responses
        for row, same in zip(result.logprobs, expected.logprobs, strict=True):
            torch.testing.assert_close(row, same, atol=1e-5, rtol=0)
    assert result.values is None


def test_paged_decodes_greedily_without_noise() -> None:
    expected = static.generate(policy(), PROMPTS, None, 1.0, Limits(STEPS, UNREACHABLE, PAD), 12)
    assert paged("llama", 5, UNREACHABLE, greedy=True).responses == expected.responses


def test_paged_gives_the_same_bits_again() -> None:
    eos = frequent_token(policy())
    first, second = paged("llama", 4, eos), paged("llama", 4, eos)
    assert first.responses == second.responses
    assert all(torch.equal(row, same) for row, same in zip(first.logprobs, second.logprobs, strict=True))


def test_a_cache_that_is_too_small_for_all_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    eos = frequent_token(policy())
    expected = paged("llama", 12, eos)
    monkeypatch.setattr(rollout_paged, "PAGE_TOKENS", 4)
    whole = rollout_paged.ContinuousBatchingConfig
    blocks: list[int] = []

    def small(num_blocks: int, **options: object) -> object:
        blocks.append(num_blocks)
        return whole(num_blocks=num_blocks // 3, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rollout_paged, "ContinuousBatchingConfig", small)
    assert paged("llama", 12, eos).responses == expected.responses
    assert len(blocks) == 1


def test_paged_has_no_values_to_give() -> None:
    with pytest.raises(EnvironmentFault, match=r"ppo\.rollout_engine"):
        rollout_paged.generate(policy(), PROMPTS, None, 1.0, Limits(STEPS, UNREACHABLE, PAD), 4, nn.Linear(32, 1))


def test_the_model_is_as_before() -> None:
    model = policy()
    before = model.config._attn_implementation
    rollout_paged.generate(model, PROMPTS[:2], None, 1.0, Limits(2, UNREACHABLE, PAD), 2)
    assert model.config._attn_implementation == before
    again = static.generate(model, PROMPTS[:2], None, 1.0, Limits(2, UNREACHABLE, PAD), 2)
    assert (
        again.responses == static.generate(policy(), PROMPTS[:2], None, 1.0, Limits(2, UNREACHABLE, PAD), 2).responses
    )
