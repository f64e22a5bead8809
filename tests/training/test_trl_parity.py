"""Our PPO against what TRL 1.12.0's computed on the same batch, recorded by benchmarks/record_trl_fixture.py.

Layout `separate`. Where the two differ by intention, the test translates, so that everything else is compared number
by number:

- After a response that ended early TRL keeps one more position: it puts the score there, on the
  first pad token, with a KL of zero,
  and has the value model predict (and learn) the value behind EOS. Ours ends the episode at EOS: the score is on it,
  and the value behind it is zero. `with_place_behind_eos` gives our functions that extra position. In the case `full`
  there is none, and the two agree as they are.
- TRL whitens advantages with the unbiased variance (n - 1), ours with n.
- TRL takes the mean of a micro-batch: the policy loss over its response tokens, the value loss over
  these and the extra positions.
  Ours divides both sums by the response tokens of the whole mini-batch. Micro-batch and mini-batch are the same here.
- TRL adds 1e-7 to the temperature, and does not clip gradients.
- TRL cuts a response at a pad token the policy sampled, and takes a micro-batch's mean for its
  share whatever its number of tokens, with
  one optimizer step per epoch as soon as it accumulates. Neither happens in the recorded batch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from config.load import load
from config.methods.method import Targets
from config.methods.ppo import Ppo, advantages, gae, whiten
from tests.training.support.one_step import step_of_the_loop
from training.modeling.scoring import score
from training.rl.episodes import joined, pad_responses
from training.rl.ppo_math import kl_per_token, masked_mean, policy_loss, token_rewards, value_loss
from training.rl.roles import Models, Roles

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "trl_ppo_loss.safetensors"
PAD, EOS = 0, 1
CASES = ("ragged", "full")
LAST = -1
"""The optimizer step whose weights and gradients are recorded: the last of the second epoch, where ratios are away
from 1 and clipped.
"""


@dataclass(frozen=True)
class Recording:
    case: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.case}/{name}"]

    @property
    def settings(self) -> Ppo:
        """The recorded hyper-parameters under our names."""
        trl = self.metadata["settings"]
        names = (
            "temperature",
            "gamma",
            "lam",
            "cliprange",
            "cliprange_value",
            "vf_coef",
            "ppo_epochs",
            "num_mini_batches",
        )
        given = {**trl, "ppo_epochs": trl["num_ppo_epochs"]}
        return load(
            ROOT / "recipes/demo.yaml",
            [*(f"ppo.{name}={given[name]}" for name in names), f"ppo.kl.coef={trl['kl_coef']}"],
        ).ppo

    def lengths(self) -> list[int]:
        return [int(length) + 1 for length in self["sequence_lengths"]]

    def prompts(self) -> list[list[int]]:
        return [row[row != PAD].tolist() for row in self["queries"]]

    def responses(self) -> list[list[int]]:
        return [row[:length].tolist() for row, length in zip(self["responses"], self.lengths(), strict=True)]

    def per_token(self, name: str, lengths: list[int]) -> list[Tensor]:
        """A recorded [B, T] tensor without what lies behind `lengths`."""
        return [row[:length] for row, length in zip(self[name], lengths, strict=True)]


@pytest.fixture(scope="module", params=CASES)
def recording(request: pytest.FixtureRequest) -> Recording:
    with safe_open(FIXTURE, "pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items() if text.startswith("{")}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Recording(request.param, tensors, metadata)


def roles(recording: Recording, policy: str, value_model: str) -> Roles:
    """The four models; the learning ones with the weights recorded under these names."""
    config = recording.metadata["shape"]

    def filled(model: PreTrainedModel, prefix: str) -> PreTrainedModel:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(recording.tensors[f"{prefix}/{name}"])
        return model.eval()

    reward_model = filled(LlamaForSequenceClassification(LlamaConfig(**config, num_labels=1)), "initial/reward_model")
    reward_model.config.score_mean, reward_model.config.score_std = 0.0, 1.0
    models = Models(
        policy=filled(LlamaForCausalLM(LlamaConfig(**config)), policy),
        ref_policy=filled(LlamaForCausalLM(LlamaConfig(**config)), "initial/ref_policy"),
        reward_model=reward_model,
        value_model=filled(LlamaForSequenceClassification(LlamaConfig(**config, num_labels=1)), value_model),
        trunk_value_head=None,
    )
    return Roles(models, recording.settings)


def initial_roles(recording: Recording) -> Roles:
    return roles(recording, "initial/policy", "initial/value_model")


def last_roles(recording: Recording) -> Roles:
    return roles(recording, f"{recording.case}/weights/policy", f"{recording.case}/weights/value_model")


def with_place_behind_eos(recording: Recording) -> list[list[int]]:
    """The responses as TRL's value model and rewards see them: a pad token behind each that ended before the last
    position.
    """
    total = recording["responses"].shape[1]
    return [[*response, PAD] if len(response) < total else response for response in recording.responses()]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_logprobs_of_policy_and_reference_are_those_of_trl(recording: Recording) -> None:
    sequences, prompt_lengths = joined(recording.prompts(), recording.responses())
    models = initial_roles(recording)
    ref_logprobs = models.ref_logprobs(sequences, prompt_lengths, 4096)
    policy_logprobs = models.forward(sequences, prompt_lengths).logprobs.detach()
    close(torch.cat(ref_logprobs), torch.cat(recording.per_token("ref_logprobs", recording.lengths())))
    close(policy_logprobs, torch.cat(recording.per_token("logprobs", recording.lengths())))


def test_scores_are_those_of_trl(recording: Recording) -> None:
    sequences, _ = joined(recording.prompts(), recording.responses())
    raw_B = score(initial_roles(recording).reward_model, sequences, budget_tokens=64)
    penalty = recording.metadata["cases"][recording.case]["missing_eos_penalty"] or 0.0
    ended_B = torch.tensor([response[-1] == EOS for response in recording.responses()])
    close(raw_B - penalty * ~ended_B, recording["scores"])


def test_values_are_those_of_trl_also_behind_eos(recording: Recording) -> None:
    responses = with_place_behind_eos(recording)
    sequences, prompt_lengths = joined(recording.prompts(), responses)
    values = initial_roles(recording).values(sequences, prompt_lengths, 4096)
    close(torch.cat(values), torch.cat(recording.per_token("values", [len(response) for response in responses])))


def targets(recording: Recording) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, advantages before whitening, returns and mask [B, T] with TRL's extra position, from its log-probs and
    values.
    """
    settings, trl = recording.settings, recording["rewards"].shape[1]
    lengths = [len(response) for response in with_place_behind_eos(recording)]
    _, mask_BT = pad_responses(recording.per_token("values", lengths))
    assert mask_BT.shape[1] == trl
    values_BT = recording["values"]
    # Both log-probs are the same mark behind the response, so the KL there is zero.
    kl_BT = kl_per_token(recording["logprobs"], recording["ref_logprobs"])
    reward_BT = token_rewards(kl_BT, recording["scores"], mask_BT, settings.kl.coef)
    return (reward_BT, *gae(reward_BT, values_BT, mask_BT, settings.gamma, settings.lam), mask_BT)


def test_rewards_and_returns_are_those_of_trl(recording: Recording) -> None:
    reward_BT, _, returns_BT, mask_BT = targets(recording)
    close(reward_BT, recording["rewards"])
    close(returns_BT[mask_BT], recording["returns"][mask_BT])


def test_whitened_advantages_are_those_of_trl_but_for_the_unbiased_variance(recording: Recording) -> None:
    _, advantages_BT, _, _ = targets(recording)
    _, mask_BT = pad_responses(recording.per_token("logprobs", recording.lengths()))
    count = int(mask_BT.sum())
    close(whiten(advantages_BT, mask_BT) * ((count - 1) / count) ** 0.5, recording["advantages"])


def loss_of_last_step(recording: Recording, models: Roles) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its policy part and its value part for the last recorded mini-batch, by our forward and our loss
    functions.
    """
    settings, rows = recording.settings, recording["rows"][LAST].tolist()
    prompts, lengths, extended = (recording.prompts(), recording.lengths(), with_place_behind_eos(recording))
    sequences, prompt_lengths = joined([prompts[i] for i in rows], [extended[i] for i in rows])
    new = models.forward(sequences, prompt_lengths)
    real_N = torch.cat([torch.arange(len(extended[i])) < lengths[i] for i in rows])

    def old(name: str) -> Tensor:
        return torch.cat([recording.per_token(name, [len(response) for response in extended])[i] for i in rows])

    policy = policy_loss(new.logprobs[real_N], old("logprobs")[real_N], old("advantages")[real_N], settings.cliprange)
    value = value_loss(new.values, old("values"), old("returns"), settings.cliprange_value)
    assert 0 < int(policy.clipped.sum()) < len(policy.clipped)
    assert 0 < int(value.clipped.sum()) < len(value.clipped)
    policy_part, value_part = policy.losses.mean(), value.losses.mean()
    return policy_part + settings.vf_coef * value_part, policy_part, value_part


def test_loss_is_that_of_trl(recording: Recording) -> None:
    loss, policy_part, value_part = loss_of_last_step(recording, last_roles(recording))
    close(policy_part.detach(), recording["pg_loss"][LAST])
    close(value_part.detach(), recording["vf_loss"][LAST])
    close(loss.detach(), recording["loss"][LAST])


def test_gradient_of_every_weight_is_that_of_trl(recording: Recording) -> None:
    models = last_roles(recording)
    loss_of_last_step(recording, models)[0].backward()
    compare_gradients(recording, models)


def compare_gradients(recording: Recording, models: Roles) -> None:
    assert models.value_model is not None
    compared = 0
    for role, model in (("policy", models.policy), ("value_model", models.value_model)):
        for name, parameter in model.named_parameters():
            theirs = recording[f"gradients/{role}/{name}"]
            assert parameter.grad is not None
            assert theirs.abs().max() > 1e-5
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-6)
            compared += parameter.numel()
    assert compared == sum(p.numel() for m in (models.policy, models.value_model) for p in m.parameters())


def test_without_responses_that_end_early_the_loop_itself_has_trls_gradients(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `full` nothing needs translation but the variance of the whitening: the loop of training/ppo.py, in
    micro-batches, gives TRL's gradient of every weight.
    """
    if recording.case == "ragged":
        assert with_place_behind_eos(recording) != recording.responses()
        return
    models, settings = last_roles(recording), recording.settings
    values = recording.per_token("values", recording.lengths())
    monkeypatch.setattr(models, "values", lambda *_: values)

    def unbiased(reward_BT: Tensor, score_B: Tensor, values_BT: Tensor, mask_BT: Tensor, chosen: Ppo) -> Targets:
        result = advantages(reward_BT, score_B, values_BT, mask_BT, chosen)
        assert float(masked_mean(result.advantages, mask_BT)) == pytest.approx(0.0, abs=1e-6)
        count = int(mask_BT.sum())
        return result._replace(advantages=result.advantages * ((count - 1) / count) ** 0.5)

    sequences, _ = joined(recording.prompts(), recording.responses())
    rows = recording["rows"][LAST].tolist()
    step_of_the_loop(
        monkeypatch,
        models,
        settings.model_copy(update={"micro_batch_tokens": max(len(sequences[i]) for i in rows)}),
        unbiased,
        recording.prompts(),
        recording.responses(),
        recording.per_token("logprobs", recording.lengths()),
        recording["scores"],
        rows,
    )
    compare_gradients(recording, models)
