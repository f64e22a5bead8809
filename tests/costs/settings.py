"""Settings that several tests share."""

from dataclasses import replace
from typing import Any

from benchmarks.published.engines import engine
from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.tables.catalogue import hardware, shape
from costs.tables.shapes import ModelShape

ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


def small(**changes: Any) -> ModelShape:
    """A Llama whose sizes all differ, so that no formula can take one for another.

    A layer's matrices have 120 (q), 60 (k), 60 (v), 120 (o) and three times 170 weights, 870 together and 890 with its
    norms; the tables have 1,010 each; all is 4,700 parameters.
    """
    sizes: dict[str, Any] = {
        "family": "llama",
        "width": 10,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 3,
        "mlp_width": 17,
        "vocab": 101,
        "tied": False,
    }
    return ModelShape("small", **(sizes | changes))


def small_mixture() -> ModelShape:
    """The same with four experts of which two are used: a layer has 40 weights of a router and twelve times 170, of
    which a token meets six times 170.
    """
    return small(family="mixtral", experts=4, experts_per_token=2, expert_width=17, mlp_width=19)


def small_setting(work: dict[str, Any] | None = None, model: ModelShape | None = None, **chosen: Any) -> Setting:
    """`sft` of `small` (or of `model`) on sequences of eight tokens, with further fields of its workload."""
    setting = sft(**({"tokens": 8} | chosen))
    return replace(setting, model=model or small(), workload=replace(setting.workload, **(work or {})))


def sft(
    model: str = "llama-3.2-1b",
    device: str = "a100-80",
    gpus: int = 1,
    software: str = "ours",
    tokens: int = 1024,
    **levers: Any,
) -> Setting:
    """Supervised fine-tuning with 100 steps."""
    return Setting(
        "sft", shape(model), Levers(**levers), Workload(tokens, tokens, 100), hardware(device), engine(software), gpus
    )


def ppo(
    layout: Any = "separate", device: str = "a100-80", stage: str = "ppo", model: str = "llama-3.2-1b", **levers: Any
) -> Setting:
    """Ten PPO updates of 64 responses."""
    other = shape(model)
    loop = Rlhf(layout=layout, reward=other, value=other, batch=64, rollout_batch=64, ppo_epochs=4, mini_batches=2)
    work = Workload(512, 512, 10, prompt_tokens=256, response_tokens=256, mean_response_tokens=256)
    return Setting(
        stage, other, Levers(**{"micro_batch": 4, **levers}), work, hardware(device), engine("ours"), rlhf=loop
    )
