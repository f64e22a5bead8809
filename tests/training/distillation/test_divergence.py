"""The divergence: by hand, against dense torch, and against TRL's trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DistillationConfig, DistillationTrainer

from tests.training.support.tiny import policy, prompts, random_responses, tokenizer
from training.distillation.divergence import divergence, generalised_jsd
from training.modeling import logprobs
from training.modeling.sequences import response_hidden
from training.rl.episodes import joined

BETAS = (0.0, 0.3, 0.5, 1.0)


def log(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_two_tokens_by_hand() -> None:
    student, teacher = log([0.5, 0.5]), log([0.9, 0.1])
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    mixed = 0.5 * (0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3)) + 0.5 * (
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    )
    result = [generalised_jsd(student, teacher, beta).item() for beta in (0.0, 1.0, 0.5)]
    assert result == pytest.approx([forward, reverse, mixed], rel=1e-6)


@pytest.mark.parametrize(("end", "near"), [(0.0, 1e-5), (1.0, 1 - 1e-5)])
def test_the_ends_are_what_the_divergence_tends_to(end: float, near: float) -> None:
    student, teacher = log([0.5, 0.3, 0.2]), log([0.2, 0.2, 0.6])
    scale = near if end == 0 else 1 - near
    between = generalised_jsd(student, teacher, near) / scale
    torch.testing.assert_close(generalised_jsd(student, teacher, end), between, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_chunks_have_the_loss_and_the_gradients_of_dense_logits(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 3 * 40)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = drawn(8, 6).requires_grad_(), drawn(40, 6).requires_grad_()
    teacher_hidden, teacher_weight = drawn(8, 10), drawn(44, 10)  # 4 rows of padding
    student = torch.log_softmax(hidden @ weight.T / 0.7, dim=1)
    teacher = torch.log_softmax(teacher_hidden @ teacher_weight[:40].T / 0.7, dim=1)
    dense = generalised_jsd(student, teacher, beta).sum()
    wanted = torch.autograd.grad(3 * dense, (hidden, weight))
    result = divergence(hidden, weight, teacher_hidden, teacher_weight, beta, 0.7)
    grads = torch.autograd.grad(3 * result.total, (hidden, weight))
    torch.testing.assert_close(result.total, dense)
    assert torch.equal(result.agreed_N, student.argmax(1) == teacher.argmax(1))
    for mine, by_torch in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, by_torch, rtol=1e-4, atol=3e-5)


def test_a_scaled_gradient_does_not_vanish_in_fp16() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(4, 6, generator=generator), torch.randn(40, 6, generator=generator)]
    hidden = (exact[0] * 1e-4).half().requires_grad_()
    weight = (exact[1] * 1e-4).half().requires_grad_()
    result = divergence(hidden, weight, exact[0].half(), exact[1].half(), 0.0, 1.0)
    (result.total * 2.0**20).backward()
    assert hidden.grad is not None
    assert (hidden.grad != 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_batch_has_the_loss_and_the_gradients_of_trls_trainer(beta: float, tmp_path: Path) -> None:
    student, teacher = policy(seed=1), policy(seed=2, family="qwen3")
    batch, responses = prompts(5), random_responses([3, 9, 1, 6, 4])
    trainer = DistillationTrainer(
        model=policy(seed=1),
        teacher_model=teacher,
        args=DistillationConfig(output_dir=str(tmp_path), beta=beta, temperature=0.8, use_cpu=True, report_to="none"),
        train_dataset=Dataset.from_list([{"prompt": "hello"}]),
        processing_class=tokenizer(),
    )
    inputs = trls_inputs(batch, responses)
    tokens = int(inputs["completion_mask"].sum())
    theirs, _, counted = trainer._compute_loss(trainer.model, inputs, None)
    theirs.backward()
    sequences, starts = joined(batch, responses)
    teacher.requires_grad_(False)
    result = divergence(
        response_hidden(student, sequences, starts),
        student.lm_head.weight,
        response_hidden(teacher, sequences, starts),
        teacher.lm_head.weight,
        beta,
        0.8,
    )
    assert tokens == int(counted)
    (result.total / tokens).backward()
    torch.testing.assert_close(result.total / tokens, theirs, rtol=1e-5, atol=1e-6)
    trl = dict(trainer.model.named_parameters())
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.grad, trl[name].grad, rtol=1e-3, atol=1e-6)


def trls_inputs(batch: list[list[int]], responses: list[list[int]]) -> dict[str, Any]:
    """Prompts padded on the left, completions on the right."""
    longest, most = max(map(len, batch)), max(map(len, responses))
    pad = tokenizer().pad_token_id
    return {
        "prompt_ids": torch.tensor([[pad] * (longest - len(row)) + row for row in batch]),
        "prompt_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch]),
        "completion_ids": torch.tensor([row + [pad] * (most - len(row)) for row in responses]),
        "completion_mask": torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in responses]),
    }
