"""Settings that several tests share."""

from typing import Any

from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.tables.catalogue import hardware, shape
from costs.tables.engines import engine

ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


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
        "sft",
        shape(model),
        Levers(**levers),
        Workload(tokens, tokens, 100),
        hardware(device),
        engine(software),
        gpus,
    )


def ppo(
    layout: Any = "separate",
    device: str = "a100-80",
    stage: str = "ppo",
    model: str = "llama-3.2-1b",
    **levers: Any,
) -> Setting:
    """Ten PPO updates of 64 responses."""
    other = shape(model)
    loop = Rlhf(
        layout=layout,
        reward=other,
        value=other,
        batch=64,
        rollout_batch=64,
        ppo_epochs=4,
        mini_batches=2,
    )
    work = Workload(512, 512, 10, prompt_tokens=256, response_tokens=256, mean_response_tokens=256)
    return Setting(
        stage,
        other,
        Levers(**{"micro_batch": 4, **levers}),
        work,
        hardware(device),
        engine("ours"),
        rlhf=loop,
    )
