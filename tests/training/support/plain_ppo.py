"""PPO again, in plain torch: one sequence at a time, full logits, autograd and torch's optimizer. What `ppo` is
compared with.

It shares no code with training/: every setting finds its place here a second time. Weights come from the folders that
`ppo` reads.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from config.methods.ppo import Ppo
from config.schema import Params
from config.sections.levers import Lora
from training.rl.episodes import stream_seed

PEFT_NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


@dataclass
class Outcome:
    """What a run leaves behind that its settings decide."""

    rows: list[dict[str, float]] = field(default_factory=list)
    """The logged row of each update."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    """Updates after which a checkpoint was written."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of everything that learns, by its name in a checkpoint."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Adam's mean of the clipped gradients."""
    rates: list[float] = field(default_factory=list)
    """Learning rates of policy and value in the last update."""


def plain_ppo(root: Path, params: Params, settings: Ppo) -> Outcome:
    """The whole run of `settings` in the project folder `root`."""
    seed, outcome = params.seed, Outcome()
    tokenizer = AutoTokenizer.from_pretrained(root / "data/tokenizer")
    room = params.model.context_length - settings.max_new_tokens
    lines = (root / "data/prepared/prompts/train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    prompts = [ids for ids in prompts if len(ids) <= room]
    models = _Models(root, settings, seed)
    optimizer = models.optimizer(settings)
    kl_coef, episodes = settings.kl.coef, 0
    if settings.on_divergence == "roll_back":  # where the first updates would go back to
        outcome.saved.append(0)
    for update in range(1, settings.updates + 1):
        # 1. roll out
        chosen = []
        for place in range(
            (update - 1) * settings.batch_size // settings.responses_per_prompt,
            update * settings.batch_size // settings.responses_per_prompt,
        ):
            order = torch.randperm(
                len(prompts), generator=_generator(stream_seed(seed, "prompts", place // len(prompts)))
            )
            chosen += [prompts[int(order[place % len(prompts)])]] * settings.responses_per_prompt
        noise = torch.rand(
            settings.batch_size, settings.max_new_tokens, generator=_generator(stream_seed(seed, "sampling", update))
        )
        replies = [
            _sample(models.policy, ids, row, settings.temperature, tokenizer.eos_token_id)
            for ids, row in zip(chosen, noise, strict=True)
        ]
        pairs = list(zip(chosen, replies, strict=True))
        # 2. score
        score = torch.stack([models.score(prompt + reply) for prompt, reply in pairs])
        ended = torch.tensor([reply[-1] == tokenizer.eos_token_id for reply in replies])
        shaped = torch.where(ended, score, score - settings.missing_eos_penalty)
        if settings.score_clip is not None:
            shaped = shaped.clamp(-settings.score_clip, settings.score_clip)
        # 3. log-probs and values
        with torch.no_grad():
            old = [models.policy_pass(prompt, reply, settings.temperature)[0] for prompt, reply in pairs]
            ref = [
                _logprobs(models.ref_logits(prompt + reply), prompt, reply, settings.temperature)[0]
                for prompt, reply in pairs
            ]
            values = [models.values(prompt, reply) for prompt, reply in pairs]
        # 4. rewards
        rewards = []
        for mine, theirs, final in zip(old, ref, shaped, strict=True):
            reward = -kl_coef * (mine - theirs)
            reward[-1] += final
            rewards.append(reward)
        if settings.whiten_rewards:
            rewards = _each(rewards, lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt() + x.mean())
        # 5. advantages: A_t = sum over k of (gamma lam)^k delta_(t+k)
        advantages = []
        for reward, value in zip(rewards, values, strict=True):
            delta = reward + settings.gamma * torch.cat([value[1:], torch.zeros(1)]) - value
            steps = range(len(delta))
            advantages.append(
                torch.stack(
                    [sum((settings.gamma * settings.lam) ** (k - t) * delta[k] for k in steps[t:]) for t in steps]
                )
            )  # type: ignore[arg-type]
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        advantages = _each(advantages, lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt())
        # 6. update
        factor = 1 - (update - 1) / settings.updates if settings.schedule == "linear" else 1.0
        outcome.rates = [settings.learning_rate * factor, settings.value_learning_rate * factor]
        for group, rate in zip(optimizer.param_groups, outcome.rates, strict=True):
            group["lr"] = rate
        generator = _generator(stream_seed(seed, "mini_batches", update))
        size = settings.batch_size // settings.num_mini_batches
        seen: list[dict[str, Tensor]] = []
        norms = []
        for _ in range(settings.ppo_epochs):
            for rows in torch.randperm(settings.batch_size, generator=generator).split(size):
                if (
                    seen
                    and settings.target_kl is not None
                    and float(_approx_kl(seen[-1]["ratio"]).mean()) > settings.target_kl
                ):
                    continue
                parts = []
                for i in rows.tolist():
                    logprobs, entropy = models.policy_pass(*pairs[i], settings.temperature)
                    value = models.values(*pairs[i])
                    ratio = (logprobs - old[i]).exp()
                    whole = (logprobs - old[i]).mean().exp().expand_as(ratio)
                    compared = whole if settings.policy_loss == "gspo" else ratio
                    highest = 1 + (settings.cliprange_high or settings.cliprange)
                    pull = torch.stack(
                        [-advantages[i] * compared, -advantages[i] * compared.clamp(1 - settings.cliprange, highest)]
                    )
                    near = values[i] + (value - values[i]).clamp(-settings.cliprange_value, settings.cliprange_value)
                    errors = torch.stack([(value - returns[i]) ** 2, (near - returns[i]) ** 2])
                    parts.append(
                        {
                            "policy_loss": pull.amax(0),
                            "value_loss": errors.amax(0) / 2,
                            "entropy": entropy,
                            "ratio": ratio,
                            "clip_fraction": (pull[1] > pull[0]).float(),
                            "value_clip_fraction": (errors[1] > errors[0]).float(),
                        }
                    )
                tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                optimizer.zero_grad()
                (tokens["policy_loss"].mean() + settings.vf_coef * tokens["value_loss"].mean()).backward()
                clipped = [
                    nn.utils.clip_grad_norm_(group["params"], settings.max_grad_norm)
                    for group in optimizer.param_groups
                ]
                norms.append(float(clipped[0]))
                optimizer.step()
                seen.append({name: x.detach() for name, x in tokens.items()})
        # 7. report
        episodes += settings.batch_size
        kl = torch.stack([(mine - theirs).sum() for mine, theirs in zip(old, ref, strict=True)])
        every_return, every_value = torch.cat(returns), torch.cat(values)
        by_update = {name: torch.cat([part[name] for part in seen]) for name in seen[0]}
        outcome.rows.append(
            {
                "score": float(score.mean()),
                "score_std": float(score.std()),
                "kl": float(kl.mean()),
                "kl_error": float(kl.std()) / math.sqrt(len(kl)),
                "kl_coef": kl_coef,
                "reward": float((score - kl_coef * kl).mean()),
                "length": sum(map(len, replies)) / len(replies),
                "eos_rate": float(ended.float().mean()),
                "value": float(every_value.mean()),
                "return": float(every_return.mean()),
                "explained_variance": 1
                - float((every_return - every_value).var(correction=0) / every_return.var(correction=0)),
                **{name: float(x.mean()) for name, x in by_update.items()},
                "approx_kl": float(_approx_kl(by_update["ratio"]).mean()),
                "grad_norm": sum(norms) / len(norms),
                "learning_rate": outcome.rates[0],
                "first_ratio_error": 0.0,
                "episodes": episodes,
            }
        )
        if update % settings.sample_every_updates == 0:
            outcome.samples += [
                {
                    "step": update,
                    "score": float(value),
                    "prompt": tokenizer.decode(prompt, skip_special_tokens=True).strip(),
                    "response": tokenizer.decode(reply, skip_special_tokens=True).strip(),
                }
                for (prompt, reply), value in list(zip(pairs, score, strict=True))[:4]
            ]
        if update % settings.checkpoint_every_updates == 0:
            outcome.saved.append(update)
        if settings.kl.controller == "adaptive":
            error = max(-0.2, min(0.2, float(kl.mean()) / settings.kl.target - 1))
            kl_coef *= 1 + error * settings.batch_size / settings.kl.horizon
        if settings.max_kl is not None and float(kl.mean()) > settings.max_kl:
            break
    outcome.saved.append(update)  # the model
    named = models.learning()
    outcome.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    outcome.moments = {
        name: optimizer.state[p]["exp_avg"].clone() for name, p in named.items() if "exp_avg" in optimizer.state[p]
    }
    return outcome


def adapted(model: PreTrainedModel, lora: Lora, seed: int) -> PreTrainedModel:
    """The model with PEFT's adapters in it, A drawn from `seed`."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=[PEFT_NAMES[name] for name in lora.modules])
    torch.manual_seed(seed)
    inner: PreTrainedModel = get_peft_model(model, config).get_base_model()
    return inner


class _Models:
    """The four roles, each a model of its own but where `layout` shares a trunk."""

    def __init__(self, root: Path, settings: Ppo, seed: int) -> None:
        self.policy, self._ref = (
            AutoModelForCausalLM.from_pretrained(root / "models/sft", dtype=torch.float32).eval() for _ in range(2)
        )
        self._reward = AutoModelForSequenceClassification.from_pretrained(
            root / "models/reward", dtype=torch.float32
        ).eval()
        self._mean, self._std = self._reward.config.score_mean, self._reward.config.score_std
        width = self.policy.config.hidden_size
        head = nn.Linear(width, 1, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.randn(1, width, generator=_generator(seed)) / math.sqrt(width + 1))
        if settings.layout == "shared_trunk":
            self._value, self._head = None, head
        elif settings.value_init == "reward":
            self._value = AutoModelForSequenceClassification.from_pretrained(
                root / "models/reward", dtype=torch.float32
            ).eval()
            self._head = nn.Linear(width, 1)
            with torch.no_grad():
                self._head.weight.copy_(self._value.score.weight / self._std)
                self._head.bias.fill_(-self._mean / self._std)
        else:
            self._value, self._head = (
                AutoModelForCausalLM.from_pretrained(root / "models/sft", dtype=torch.float32).eval(),
                head,
            )
        if settings.lora is not None:
            self.policy = adapted(self.policy, settings.lora, seed)
            self._value = adapted(self._value, settings.lora, seed + 1) if self._value is not None else None

    def optimizer(self, settings: Ppo) -> torch.optim.Optimizer:
        named = self.learning()
        groups = [
            {"params": [p for name, p in named.items() if name.startswith(part)], "lr": 1.0}
            for part in ("policy.", "value.")
        ]
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else AdamW8bit
        return kind(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def learning(self) -> dict[str, nn.Parameter]:
        """By its name in a checkpoint."""
        result = {}
        for part, model in (("policy", self.policy), ("value", self._value)):
            if model is not None:
                trained = {
                    name: p
                    for name, p in model.named_parameters()
                    if p.requires_grad and not name.startswith(("score.", "lm_head."))
                }
                result |= {f"{part}.{name.replace('.default.', f'.{part}.')}": p for name, p in trained.items()}
        prefix = "value." if self._value is None else "value.score."
        return result | {f"{prefix}{name}": p for name, p in self._head.named_parameters()}

    def policy_pass(self, prompt: list[int], reply: list[int], temperature: float) -> tuple[Tensor, Tensor]:
        return _logprobs(self.policy(torch.tensor([prompt + reply])).logits[0], prompt, reply, temperature)

    def ref_logits(self, ids: list[int]) -> Tensor:
        logits: Tensor = self._ref(torch.tensor([ids])).logits[0]
        return logits

    def values(self, prompt: list[int], reply: list[int]) -> Tensor:
        trunk = self.policy if self._value is None else self._value
        hidden = trunk.base_model(torch.tensor([prompt + reply])).last_hidden_state[0]
        values: Tensor = self._head(hidden[len(prompt) - 1 : -1])[:, 0]
        return values

    @torch.no_grad()
    def score(self, ids: list[int]) -> Tensor:
        raw: Tensor = self._reward.score(self._reward.base_model(torch.tensor([ids])).last_hidden_state[0, -1])[0]
        return (raw - self._mean) / self._std


@torch.no_grad()
def _sample(policy: PreTrainedModel, prompt: list[int], noise: Tensor, temperature: float, eos: int) -> list[int]:
    """Token after token, the whole sequence read again for each: that at which the cumulative probability passes the
    noise.
    """
    reply: list[int] = []
    for uniform in noise:
        probabilities = torch.softmax(policy(torch.tensor([prompt + reply])).logits[0, -1] / temperature, dim=0)
        reply.append(int((probabilities.cumsum(0) > uniform).nonzero()[0]))
        if reply[-1] == eos:
            break
    return reply


def _logprobs(logits: Tensor, prompt: list[int], reply: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Of the reply's tokens, and the entropy of each distribution."""
    every = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return every[torch.arange(len(reply)), torch.tensor(reply)], -(every.exp() * every).sum(-1).detach()


def _approx_kl(ratio: Tensor) -> Tensor:
    return ratio - 1 - ratio.log()


def _each(rows: list[Tensor], of_all: Any) -> list[Tensor]:
    """A function of all tokens together, given back row by row."""
    return list(of_all(torch.cat(rows)).split([len(row) for row in rows]))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
