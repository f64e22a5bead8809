import pytest
import torch

from tests.training.support.tiny import FAMILIES, prompts, random_responses, reward_model
from training.modeling.scoring import raw_pair_scores, raw_scores, score

SEQUENCES = [
    [*prompt, *response, 2]
    for prompt, response in zip(prompts(7), random_responses([1, 12, 5, 3, 9, 1, 7]), strict=True)
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget_tokens", [1, 60, 100_000])
def test_a_score_is_the_heads_word_at_the_last_real_token_in_any_batch(family: str, budget_tokens: int) -> None:
    model = reward_model(family=family)
    with torch.no_grad():
        expected = [
            model.score(model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]).item()
            for ids in SEQUENCES
        ]
    assert raw_scores(model, SEQUENCES, budget_tokens).tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_own_forward(family: str) -> None:
    model = reward_model(family=family)
    with torch.no_grad():
        theirs = [model(input_ids=torch.tensor([ids])).logits.item() for ids in SEQUENCES]
    assert raw_scores(model, SEQUENCES, 10_000).tolist() == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("budget_tokens", [1, 60, 100_000])
def test_both_sequences_of_a_pair_have_the_scores_that_each_has_alone(budget_tokens: int) -> None:
    others = prompts(7, seed=1)
    pairs = [(ids, [*ids[:3], *other, 2]) for ids, other in zip(SEQUENCES, others, strict=True)]
    pairs += [(SEQUENCES[0], SEQUENCES[0]), ([2], [2])]
    alone = raw_scores(reward_model(), [ids for pair in pairs for ids in pair], 10_000)
    torch.testing.assert_close(
        raw_pair_scores(reward_model(), pairs, budget_tokens), alone.view(-1, 2), atol=1e-5, rtol=0
    )


def test_the_stored_normalisation_is_applied() -> None:
    model = reward_model()
    raw = raw_scores(model, SEQUENCES, 10_000)
    model.config.score_mean, model.config.score_std = 0.4, 2.5
    torch.testing.assert_close(score(model, SEQUENCES, 10_000), (raw - 0.4) / 2.5)
    torch.testing.assert_close(raw_scores(model, SEQUENCES, 10_000), raw)


def test_scoring_keeps_no_graph() -> None:
    assert not score(reward_model(), SEQUENCES, 10_000).requires_grad
