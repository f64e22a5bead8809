"""Configurations for benchmarks/plan_accuracy.py, drawn from a seed: sizes, lengths, batches,
layouts and levers of one stage each.

A draw is kept if its stage can be measured here in reasonable time and its tensors are large enough
to stand out from the process's own memory; both limits are on the work itself, not on what the
planner says about it.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.projects.checkouts import ROOT
from config.errors import ParamsError
from config.load import read, validate
from config.schema import Params
from config.sections.model import Model
from config.sections.where import SHARED_STAGES
from costs.formulas.counts import forward_matmul_flops
from costs.planning.models import base_shape
from costs.tables.shapes import ModelShape

RECIPE = ROOT / "recipes" / "demo.yaml"
STAGES = ("sft", "reward", "ppo", "evaluate", "ppo", "dpo", "rloo", "ppo")
"""Drawn in turn where none are named: PPO more often, which has most ways to be run."""
KNOWN = tuple(dict.fromkeys(STAGES))
SHARDINGS = ("none", "zero2", "zero3")
STEPS = 4
"""Optimizer steps of sft, reward and dpo, updates of ppo and rloo."""
ANSWERING_MODELS = 3
"""Steps of evaluate."""
MOST_FLOPS = 3e11
"""Of a whole run: some ten seconds on one core."""
LEAST_BYTES = 200e6
"""States and activations together, roughly."""
SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """One stage with the params it is run with."""

    name: str
    stage: str
    params: Params
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt of the data, in tokens."""
    response_tokens: tuple[int, int]
    """The same for responses, their end-of-sequence token included."""
    model: Model
    """The random model that the stage starts from; in `params` it is a folder where adapters or
    four bits need one.
    """
    shape: ModelShape


def draw(
    seed: int,
    count: int,
    stages: tuple[str, ...] = STAGES,
    recipe: Path = RECIPE,
    processes: int = 1,
) -> list[Case]:
    """`count` cases, the stages in turn; the same for the same arguments. Several processes divide
    each stage that can be shared, in one of the ways that `sharding` knows.
    """
    rng, found = random.Random(seed), list[Case]()
    base = read(recipe)
    while len(found) < count:
        stage = stages[len(found) % len(stages)]
        name = f"{seed}-{len(found):02d}-{stage}"
        if processes > 1 and stage in SHARED_STAGES:
            divided = rng.choice(SHARDINGS)
            place = base["where"]["default"] | {"processes": processes, "sharding": divided}
            shared = base | {"where": base["where"] | {"default": place}}
            case = _divisible(f"{name}-{divided}", stage, rng, shared)
        else:
            case = _case(name, stage, rng, base)
        if case is not None:
            found.append(case)
    return found


def _divisible(name: str, stage: str, rng: random.Random, base: dict[str, Any]) -> Case | None:
    """A case, None where what was drawn cannot be shared as it says."""
    try:
        return _case(name, stage, rng, base)
    except ParamsError:
        return None


def _case(name: str, stage: str, rng: random.Random, base: dict[str, Any]) -> Case | None:
    heads = rng.choice((2, 4, 6, 8))
    width = heads * rng.choice((32, 64))
    length = rng.choice((64, 128, 192, 320, 512))
    prompt = length * rng.choice((3, 4, 5)) // 8
    response = length - prompt
    shortest = rng.choice((0.5, 0.8, 1.0))
    model = {
        "family": rng.choice(("llama", "llama", "qwen2", "gpt2")),
        "width": width,
        "layers": rng.choice((2, 3, 4, 6, 8)),
        "heads": heads,
        "kv_heads": heads // rng.choice((1, 2)),
        "mlp_width": width * rng.choice((2, 3, 4)),
        "vocab_size": rng.choice((512, 2048, 8192, 32000)),
        "tie_embeddings": rng.random() < 0.5,
        "rope_theta": 1.0e6,
    }
    if model["family"] == "gpt2":
        model |= {"kv_heads": heads, "tie_embeddings": True}
    content = {**base, "seed": rng.randrange(1000)}
    content["model"] = base["model"] | {
        "random": model,
        "context_length": length + 1,
        "attention": "sdpa" if rng.random() < 0.8 else "eager",
    }
    for section, fields in base.items():  # what is not measured has to fit the context too
        lengths = {
            key: min(fields[key], length)
            for key in ("max_length", "max_new_tokens")
            if isinstance(fields, dict) and key in fields
        }
        content[section] = {**fields, **lengths} if lengths else content[section]
    if stage == "evaluate":  # words that mean nothing have no gold score
        content["data"] = base["data"] | {
            "source": {"kind": "file", "path": "rows.jsonl", "format": "prompts", "columns": {}}
        }
    content[stage] = base[stage] | _section(rng, stage, length, response)
    whole = validate(content | {"ppo": content["ppo"] | {"layout": "separate"}}, name)
    adapters = _adapters(rng, stage, content)
    params = validate(content, name) if adapters else whole
    # a policy of random weights never ends
    said = (response, response) if stage in ANSWERING else _spread(response, shortest)
    shape = base_shape(whole, Path())
    case = Case(name, stage, params, _spread(prompt, shortest), said, whole.model, shape)
    return case if _flops(case) <= MOST_FLOPS and _bytes(case) >= LEAST_BYTES else None


def _adapters(rng: random.Random, stage: str, content: dict[str, Any]) -> bool:
    """LoRA for a quarter of the cases, over four bits for a tenth: `content` then starts from a
    folder.
    """
    drawn, shared = rng.random(), stage == "ppo" and content["ppo"]["layout"] == "shared_base"
    if stage == "evaluate" or (drawn >= 0.35 and not shared):
        return False
    modules = rng.choice(
        (["q", "v"], ["q", "k", "v", "o"], ["q", "k", "v", "o", "gate", "up", "down"])
    )
    if content["model"]["random"]["family"] == "gpt2":
        modules = ["q", "k", "v", "o"]
    content[stage] = content[stage] | {
        "lora": {"rank": rng.choice((4, 16)), "alpha": 16.0, "modules": modules, "dropout": 0.0}
    }
    four_bits = drawn < 0.1 and content["model"]["random"]["family"] == "llama"
    if shared:  # the reward model's adapter, of which the value model's is a second copy
        content["reward"] = content["reward"] | {"lora": content[stage]["lora"], "init": "sft"}
    if four_bits and stage != "ppo":
        content["ppo"] = content["ppo"] | {"lora": content[stage]["lora"]}
    content["model"] = content["model"] | {
        "path": "./base",
        "random": None,
        "quantisation": "nf4" if four_bits else None,
    }
    return True


def _spread(longest: int, shortest: float) -> tuple[int, int]:
    return max(2, round(longest * shortest)), longest


ANSWERING = ("ppo", "rloo", "evaluate")
"""Stages whose responses are sampled."""


def _section(rng: random.Random, stage: str, length: int, response: int) -> dict[str, Any]:
    """What is drawn of a stage's own parameters."""
    match stage:
        case "ppo":
            return _ppo(rng, length, response)
        case "rloo":
            return _rloo(rng, length, response)
        case "evaluate":
            batch = rng.choice((8, 16, 32))
            return {
                "prompts": 2 * batch,
                "batch_size": batch,
                "max_new_tokens": response,
                "samples": 1,
            }
        case _:
            return _trainer(rng, stage, length)


def _trainer(rng: random.Random, stage: str, length: int) -> dict[str, Any]:
    micro = rng.choice((1, 2, 4, 8, 16))
    return {
        "batch_size": micro * rng.choice((1, 1, 2, 4)),
        "micro_batch_size": micro,
        "max_steps": STEPS,
        "max_length": length,
        "activation_checkpointing": rng.random() < 0.25,
        "checkpoint_every_steps": 1000,
        "log_every_steps": 1,
    } | ({"init": "sft", "layers": None} if stage == "reward" else {})


def _ppo(rng: random.Random, length: int, response: int) -> dict[str, Any]:
    batch, mini_batches = rng.choice((8, 16, 32)), rng.choice((1, 2, 4))
    return {
        "layout": rng.choice(("separate", "shared_trunk", "shared_base")),
        "updates": STEPS,
        "batch_size": batch,
        "max_new_tokens": response,
        "rollout_batch_size": rng.choice((batch, batch // 2)),
        "ppo_epochs": rng.choice((1, 2)),
        "num_mini_batches": mini_batches,
        "micro_batch_tokens": length * rng.choice((1, 2, 4, 8)),
        "checkpoint_every_updates": 1000,
        "sample_every_updates": 1000,
        "missing_eos_penalty": 0.0,
        "target_kl": None,
        "max_kl": None,
        "responses_per_prompt": 1,
        "learning_rate": 1.0e-5,
    }


def _rloo(rng: random.Random, length: int, response: int) -> dict[str, Any]:
    batch, mini_batches = rng.choice((8, 16, 32)), rng.choice((1, 2))
    return {
        "updates": STEPS,
        "batch_size": batch,
        "responses_per_prompt": 2,
        "max_new_tokens": response,
        "rollout_batch_size": batch,
        "rloo_epochs": rng.choice((1, 2)),
        "num_mini_batches": mini_batches,
        "missing_eos_penalty": 0.0,
        "micro_batch_tokens": length * rng.choice((1, 2, 4, 8)),
        "target_kl": None,
        "max_kl": None,
        "activation_checkpointing": rng.random() < 0.25,
        "learning_rate": 1.0e-5,
        "checkpoint_every_updates": 1000,
        "sample_every_updates": 1000,
    }


def section(case: Case) -> Any:
    """The params of the case's stage."""
    return getattr(case.params, case.stage)


def steps(case: Case) -> int:
    """Usage rows of each phase."""
    return ANSWERING_MODELS if case.stage == "evaluate" else STEPS


def _passes(case: Case) -> float:
    """Forward passes' worth of work, over all sequences: a step forward and backward is three."""
    own = section(case)
    match case.stage:
        case "ppo" | "rloo":
            return STEPS * own.batch_size * (3 * own.epochs + 3)
        case "evaluate":
            return ANSWERING_MODELS * own.prompts * 4.0
        case _:
            return 3.0 * STEPS * own.batch_size * (1 if case.stage == "sft" else 2)


def _flops(case: Case) -> float:
    tokens = _passes(case) * (case.prompt_tokens[1] + case.response_tokens[1])
    return forward_matmul_flops(case.shape, tokens, 0.0 if case.stage == "reward" else tokens)


def _bytes(case: Case) -> float:
    """Weights, gradients and moments of what learns, and forty widths a layer of the longest
    micro-batch; of evaluate, three models.
    """
    if case.stage == "evaluate":
        return 12.0 * case.shape.parameters
    length, own = case.prompt_tokens[1] + case.response_tokens[1], section(case)
    tokens = (
        own.micro_batch_tokens if case.stage in ("ppo", "rloo") else length * own.micro_batch_size
    )
    return 16.0 * case.shape.parameters + 4.0 * tokens * case.shape.layers * 20 * case.shape.width
