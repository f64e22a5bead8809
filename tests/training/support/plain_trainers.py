"""The stages on Hugging Face Trainers again, in plain torch: one sequence at a time, full logits, autograd and torch's
AdamW.

Only the order of rows is training's own (LengthBuckets); every setting finds its place here a second time.

Shapes: pairs and rows are lists of token ids.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from config.methods.dpo import Dpo
from config.schema import Params
from config.sections.offline import Optimisation, Reward, Sft
from tests.training.support.plain_ppo import adapted
from training.modeling.batching import LengthBuckets

Ids = list[int]


@dataclass
class Outcome:
    """What a run leaves behind that its settings decide."""

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """Loss, gradient norm and learning rate, by step."""
    saved: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """As they are in the model's folder."""
    steps: int = 0
    normalisation: tuple[float, float] = (0.0, 1.0)
    """Mean and deviation that scores are normalised by."""


def plain_sft(root: Path, params: Params, settings: Sft) -> Outcome:
    tokenizer, rows = AutoTokenizer.from_pretrained(root / "data/tokenizer"), []
    for row in _read(root / "data/prepared/sft/train.jsonl"):
        prompt, completion = _tokens(tokenizer, row["prompt"], row["completion"])
        ids = [*prompt, *completion][: settings.max_length]
        if len(ids) > len(prompt):
            rows.append((ids, len(prompt)))
    model = _base(root, params)
    learner = _adapted(model, settings, params.seed)

    def loss(batch: list[tuple[Ids, int]]) -> Tensor:
        return -torch.cat([_logprobs(learner, ids, start) for ids, start in batch]).mean()

    return _trained(learner, rows, [len(ids) for ids, _ in rows], loss, settings, params.seed)


def plain_reward(root: Path, params: Params, settings: Reward) -> Outcome:
    pairs = [(p + c, p + r) for p, c, r in _pairs(root, settings.max_length)]
    trunk = (
        AutoModelForCausalLM.from_pretrained(root / "models/sft", dtype=torch.float32)
        if settings.init == "sft"
        else _base(root, params)
    )
    config = AutoConfig.from_pretrained(root / "models/sft", num_labels=1)
    if settings.layers is not None:
        assert settings.layers == 1, "the first one"
        del trunk.base_model.layers[1:]
        config.num_hidden_layers = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.base_model.load_state_dict(trunk.base_model.state_dict())
    width = config.hidden_size
    with torch.no_grad():
        model.score.weight.copy_(
            torch.randn(1, width, generator=torch.Generator().manual_seed(params.seed)) / math.sqrt(width + 1)
        )
    learner = _adapted(model, settings, params.seed)
    learner.score.requires_grad_(True)

    def score(ids: Ids) -> Tensor:
        said: Tensor = learner.score(learner.base_model(torch.tensor([ids])).last_hidden_state[0, -1])[0]
        return said

    def loss(batch: list[tuple[Ids, Ids]]) -> Tensor:
        return -logsigmoid(torch.stack([score(chosen) - score(rejected) for chosen, rejected in batch])).mean()

    outcome = _trained(learner, pairs, [max(map(len, pair)) for pair in pairs], loss, settings, params.seed)
    with torch.no_grad():
        every = torch.stack([score(ids) for pair in pairs for ids in pair])
    outcome.normalisation = (float(every.mean()), float(every.std())) if settings.normalise else (0.0, 1.0)
    return outcome


def plain_dpo(root: Path, params: Params, settings: Dpo) -> Outcome:
    pairs = _pairs(root, settings.max_length)
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(root / "models/sft", dtype=torch.float32).eval() for _ in range(2)
    )
    learner = _adapted(policy, settings, params.seed)

    def loss(batch: list[tuple[Ids, Ids, Ids]]) -> Tensor:
        losses = []
        for prompt, chosen, rejected in batch:
            ratios, counts = [], []
            for reply in (chosen, rejected):
                with torch.no_grad():
                    said = _logprobs(ref, prompt + reply, len(prompt))
                ratios.append((_logprobs(learner, prompt + reply, len(prompt)) - said).sum())
                counts.append(len(reply))
            margin = settings.beta * (ratios[0] - ratios[1])
            flipped = settings.label_smoothing
            match settings.loss:
                case "sigmoid":
                    losses.append(-logsigmoid(margin))
                case "robust":
                    losses.append(
                        (-(1 - flipped) * logsigmoid(margin) + flipped * logsigmoid(-margin)) / (1 - 2 * flipped)
                    )
                case "ipo":
                    losses.append((ratios[0] / counts[0] - ratios[1] / counts[1] - 1 / (2 * settings.beta)) ** 2)
        return torch.stack(losses).mean()

    lengths = [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in pairs]
    return _trained(learner, pairs, lengths, loss, settings, params.seed)


def _trained(
    model: PreTrainedModel,
    rows: list[Any],
    lengths: list[int],
    loss_of: Callable[[list[Any]], Tensor],
    settings: Optimisation,
    seed: int,
) -> Outcome:
    """AdamW on the mean loss of each batch, its learning rate by the schedule."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = [p for name, p in learning.items() if name.endswith("bias") or "norm" in name]
    decayed = [p for p in learning.values() if not any(p is other for other in plain)]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=1.0, betas=(0.9, settings.adam_beta2), eps=1e-8
    )
    order = LengthBuckets(lengths, settings.batch_size, seed)
    total = math.ceil(math.ceil(len(rows) / settings.batch_size) * settings.epochs)
    total = min(total, settings.max_steps or total)
    warm = math.ceil(total * settings.warmup_fraction)
    outcome, step, epoch, losses = Outcome(), 0, 0, []
    while step < total:
        order.set_epoch(epoch)
        for batch in torch.tensor(list(order)).split(settings.batch_size):
            if step < warm:
                factor = step / warm
            else:
                done = (step - warm) / max(1, total - warm)
                factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
                    settings.schedule
                ]
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor
            optimizer.zero_grad()
            loss = loss_of([rows[i] for i in batch.tolist()])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(learning.values(), settings.max_grad_norm)
            optimizer.step()
            step += 1
            losses.append(float(loss.detach()))
            if step % settings.log_every_steps == 0:
                outcome.rows[step] = {
                    "loss": sum(losses) / len(losses),
                    "grad_norm": float(norm),
                    "learning_rate": settings.learning_rate * factor,
                }
                losses = []
            if step % settings.checkpoint_every_steps == 0 or step == total:
                outcome.saved.append(step)
            if step == total:
                break
        epoch += 1
    outcome.steps = total
    outcome.weights = {name.replace(".default.", "."): p.detach().clone() for name, p in learning.items()}
    return outcome


def _base(root: Path, params: Params) -> PreTrainedModel:
    """model.path, or the weights that the seed draws for model.random, whose shape is that of models/sft."""
    if params.model.path is not None:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            root / params.model.path, dtype=torch.float32
        ).eval()
        return loaded
    torch.manual_seed(params.seed)
    sampled: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(root / "models/sft"), dtype=torch.float32
    )
    layers, tied = sampled.config.num_hidden_layers, sampled.config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in sampled.named_parameters():
            if weight.ndim == 2 and "embed" not in name and not (tied and "lm_head" in name):
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(std=1 / math.sqrt(weight.shape[1] * (2 * layers if writes else 1)))
    return sampled.eval()


def _adapted(model: PreTrainedModel, settings: Optimisation, seed: int) -> PreTrainedModel:
    return model if settings.lora is None else adapted(model, settings.lora, seed)


def _logprobs(model: PreTrainedModel, ids: Ids, start: int) -> Tensor:
    """Of the tokens from `start` on."""
    every = torch.log_softmax(model(torch.tensor([ids])).logits[0, start - 1 : -1], dim=-1)
    return every[torch.arange(len(ids) - start), torch.tensor(ids[start:])]


def _pairs(root: Path, max_length: int) -> list[tuple[Ids, Ids, Ids]]:
    """Prompt, chosen and rejected reply, where both sequences fit."""
    tokenizer, result = AutoTokenizer.from_pretrained(root / "data/tokenizer"), []
    for row in _read(root / "data/prepared/preference/train.jsonl"):
        prompt, chosen, rejected = _tokens(tokenizer, row["prompt"], row["chosen"], row["rejected"])
        if len(prompt) + max(len(chosen), len(rejected)) <= max_length:
            result.append((prompt, chosen, rejected))
    return result


def _tokens(tokenizer: Any, prompt: str, *replies: str) -> list[Ids]:
    ends = [
        tokenizer(reply, add_special_tokens=False, split_special_tokens=True)["input_ids"] + [tokenizer.eos_token_id]
        for reply in replies
    ]
    return [tokenizer(prompt)["input_ids"], *ends]


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
