"""Padding is inert: the same sample alone or in any batch gives the same log-probs and values, and the same
gradients.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.training.support.tiny import FAMILIES, policy, prompts, random_responses, tokenizer
from training.modeling.sequences import per_response, response_hidden, response_targets, sequence_logprobs

RESPONSE_LENGTHS = [1, 12, 5, 3, 9, 1, 7]
PROMPTS = prompts(len(RESPONSE_LENGTHS))
SEQUENCES = [
    [*prompt, *response] for prompt, response in zip(PROMPTS, random_responses(RESPONSE_LENGTHS), strict=True)
]
PROMPT_LENGTHS = [len(prompt) for prompt in PROMPTS]


def plain_logprobs(model: PreTrainedModel, ids: list[int], prompt_length: int, temperature: float = 1.0) -> Tensor:
    """One sequence, no padding, all logits: the definition."""
    log_softmax = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0] / temperature, dim=-1)
    return log_softmax[torch.arange(prompt_length - 1, len(ids) - 1), torch.tensor(ids[prompt_length:])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget_tokens", [1, 60, 100_000])
def test_logprobs_in_any_batch_are_those_of_the_sequence_alone(family: str, budget_tokens: int) -> None:
    model = policy(family=family)
    logprobs = sequence_logprobs(model, SEQUENCES, PROMPT_LENGTHS, 0.8, budget_tokens)
    assert [len(row) for row in logprobs] == RESPONSE_LENGTHS
    for row, ids, length in zip(logprobs, SEQUENCES, PROMPT_LENGTHS, strict=True):
        torch.testing.assert_close(row, plain_logprobs(model, ids, length, 0.8).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_batch_are_the_sum_of_those_of_its_sequences_alone(family: str) -> None:
    batched, alone = policy(family=family), policy(family=family)
    weighting = torch.linspace(-1, 1, sum(RESPONSE_LENGTHS))
    hidden_ND = response_hidden(batched, SEQUENCES, PROMPT_LENGTHS)
    (torch.tanh(hidden_ND).sum(dim=1) * weighting).sum().backward()
    parts = weighting.split(RESPONSE_LENGTHS)
    for ids, length, part in zip(SEQUENCES, PROMPT_LENGTHS, parts, strict=True):
        hidden = alone.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, length - 1 : -1]
        (torch.tanh(hidden).sum(dim=1) * part).sum().backward()
    compared = 0
    for (name, named_parameter), (_, other) in zip(batched.named_parameters(), alone.named_parameters(), strict=True):
        if other.grad is not None:  # an untied output embedding is not in the hidden states
            torch.testing.assert_close(named_parameter.grad, other.grad, atol=2e-5, rtol=1e-4, msg=name)
            compared += 1
    assert compared > 10


def test_hidden_states_are_those_of_the_token_before_each_response_token() -> None:
    model = policy()
    with torch.no_grad():
        hidden_ND = response_hidden(model, SEQUENCES[:2], PROMPT_LENGTHS[:2])
        logits = hidden_ND @ model.get_output_embeddings().weight.T
        expected = [
            model(input_ids=torch.tensor([ids])).logits[0, n - 1 : -1]
            for ids, n in zip(SEQUENCES[:2], PROMPT_LENGTHS[:2], strict=True)
        ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=0)


def test_targets_are_the_response_tokens_one_after_another() -> None:
    assert response_targets([[1, 2, 3], [4, 5, 6, 7]], [2, 1]).tolist() == [3, 5, 6, 7]


def test_results_come_back_in_the_order_of_the_sequences() -> None:
    def of_rows(rows: list, lengths: list[int]) -> Tensor:
        return response_targets(rows, lengths) * 10

    results = per_response(of_rows, SEQUENCES, PROMPT_LENGTHS, 50)
    assert [row.tolist() for row in results] == [
        [10 * token for token in ids[n:]] for ids, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)
    ]


def test_the_tokenizer_pads_with_a_token_of_its_own() -> None:
    assert tokenizer().pad_token_id != tokenizer().eos_token_id
