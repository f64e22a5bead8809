"""The vllm engine, with the real vLLM where RLHF_VLLM names one."""

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from config.child import VLLM_VARIABLE
from config.errors import EnvironmentFault, ParamsError
from tests.training.support.tiny import params, policy, prompts
from training.modeling.sequences import sequence_logprobs
from training.rollout import vllm
from training.rollout.engine import Limits, Rollout, sampling_noise

LIMITS = Limits(12, 2, 0)
real = pytest.mark.skipif(shutil.which(os.environ.get(VLLM_VARIABLE, "")) is None, reason="RLHF_VLLM names no vLLM")


def test_without_vllm_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, "/nowhere/vllm")
    with pytest.raises(EnvironmentFault, match=r"no command vllm \(/nowhere/vllm\)\. Install it in"):
        vllm.generate(policy(), prompts(2), None, 1.0, LIMITS, 2)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("ppo", {"recompute_logprobs": False}),
        ("ppo", {"recompute_logprobs": True, "layout": "shared_trunk"}),
        ("rloo", {"recompute_logprobs": False}),
        ("distill", {}),
    ],
)
def test_what_it_cannot_do_is_refused(section: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match=rf"{section}\.rollout_engine=vllm .*static"):
        params(**{section: {"rollout_engine": "vllm", **changes}})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Heads of 32 numbers, which vLLM's attention on a CPU needs at least."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        max_position_embeddings=96, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def ended() -> Iterator[None]:
    """Ends the server that a test has started."""
    yield
    if vllm._server is not None:
        vllm._server.close()
        vllm._server = None


def generated(model: PreTrainedModel) -> Rollout:
    noise = sampling_noise(12, LIMITS.max_new_tokens, 5)
    return vllm.generate(model, prompts(12), noise, 1.3, LIMITS, 4)


def moved(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@real
@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_log_probs_are_those_of_the_weights_of_now(model: PreTrainedModel) -> None:
    first = generated(model)
    assert generated(model).responses == first.responses
    moved(model)
    second = generated(model)
    assert second.responses != first.responses
    assert {response[-1] for response in second.responses if len(response) < 12} <= {2}
    rows = [[*prompt, *said] for prompt, said in zip(prompts(12), second.responses, strict=True)]
    ours = sequence_logprobs(model, rows, [len(prompt) for prompt in prompts(12)], 1.3, 4096)
    for logprob, expected in zip(second.logprobs, ours, strict=True):
        torch.testing.assert_close(logprob, expected, atol=1e-4, rtol=0)


@real
@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_a_head_that_stayed_behind_and_a_lost_server_are_found(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated(model)
    moved(model)
    without_head = {name: item for name, item in model.state_dict().items() if name != "lm_head.weight"}
    with monkeypatch.context() as cut:
        cut.setattr(model, "state_dict", lambda: without_head)
        with pytest.raises(EnvironmentFault, match="it has other weights"):
            generated(model)
    assert vllm._server is not None
    os.killpg(vllm._server._process.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="vLLM ended during a rollout"):
        generated(model)
