import pytest
import torch
from torch import Tensor

from config.errors import ModelError
from tests.training.support.tiny import FAMILIES, policy
from training.modeling import logprobs
from training.modeling.logprobs import output_weight, token_logprobs

N, D, V = 23, 16, 50


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(N, D, generator=generator).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(V, (N,), generator=generator)


def plain(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(hidden_ND @ weight_VD.T / temperature, dim=1)
    return log_softmax[torch.arange(N), targets_N], -(log_softmax.exp() * log_softmax).sum(dim=1)


@pytest.fixture(params=[1, 4, 7, N, 1000], ids="rows{}".format)
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a chunk: one, some that divide N and some that do not, all."""
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", request.param * V)
    return int(request.param)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.usefixtures("chunk_rows")
def test_logprobs_and_entropy_are_those_of_the_whole_log_softmax(temperature: float) -> None:
    result = token_logprobs(*problem(), temperature)
    expected, entropy = plain(*problem(), temperature)
    torch.testing.assert_close(result.logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.entropy, entropy, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("chunk_rows")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradients_are_those_of_autograd_whatever_the_chunk(temperature: float) -> None:
    weighting_N = torch.linspace(-1, 2, N)
    (hidden, weight, targets), (same_hidden, same_weight, _) = problem(), problem()
    (token_logprobs(hidden, weight, targets, temperature).logprobs * weighting_N).sum().backward()
    (plain(same_hidden, same_weight, targets, temperature)[0] * weighting_N).sum().backward()
    torch.testing.assert_close(hidden.grad, same_hidden.grad, atol=1e-4, rtol=0)
    torch.testing.assert_close(weight.grad, same_weight.grad, atol=1e-4, rtol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_learns_gets_a_gradient(frozen: str) -> None:
    hidden, weight, targets = problem()
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    token_logprobs(hidden, weight, targets, 1.0).logprobs.sum().backward()
    assert {"hidden": hidden.grad is None, "weight": weight.grad is None} == {
        "hidden": frozen == "hidden",
        "weight": frozen == "weight",
    }


def test_entropy_is_log_v_where_all_tokens_are_equal_and_carries_no_gradient() -> None:
    hidden, weight, targets = problem()
    result = token_logprobs(0 * hidden, weight, targets, 1.0)
    torch.testing.assert_close(result.entropy, torch.full((N,), V, dtype=torch.float32).log())
    assert not result.entropy.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_weight_times_the_hidden_states_is_the_models_logits(family: str) -> None:
    model = policy(family=family)
    ids = torch.tensor([[5, 9, 14, 200]])
    with torch.no_grad():
        hidden_LD = model.base_model(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(
            hidden_LD @ output_weight(model).T, model(input_ids=ids).logits[0], atol=1e-5, rtol=0
        )


def test_logits_with_a_bias_or_a_cap_are_refused() -> None:
    capped = policy()
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="capped or biased"):
        output_weight(capped)
    biased = policy(family="qwen2")
    biased.lm_head = torch.nn.Linear(32, 320, bias=True)
    with pytest.raises(ModelError, match="capped or biased"):
        output_weight(biased)
