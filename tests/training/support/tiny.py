"""Small real parts for the tests: a tokenizer of the helpdesk world, two-layer models, a folder in which stages
run.
"""

import contextlib
import functools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.errors import StageStopped
from config.load import read, validate
from config.schema import Params
from config.sections.model import Model, RandomModel
from training.modeling.models import base_model, new_reward_model
from training.modeling.tokenizer import encode_prompts, trained_tokenizer
from training.process.run import entry, run_stage
from training.process.stage import Stage
from training.worlds.world import BY_HAND

ROOT = Path(__file__).parents[3]
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
CONTEXT = 96
WIDTH = 32


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    replies = [*BY_HAND.remedies.values(), BY_HAND.ask, BY_HAND.close, BY_HAND.apology, *BY_HAND.fillers]
    return trained_tokenizer(replies * 2, 320)


def settings(family: str = "llama") -> Model:
    """Two layers, the keys and values of two heads shared where the family can."""
    sizes = {
        "width": WIDTH,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "mlp_width": 64,
        "vocab_size": 320,
        "rope_theta": 10000.0,
    }
    shape = RandomModel.model_validate({"family": family, "tie_embeddings": family != "qwen2", **sizes})
    return Model(
        path=None,
        revision=None,
        random=shape,
        pad_token=None,
        context_length=CONTEXT,
        dtype="fp32",
        quantisation=None,
        attention="sdpa",
    )


def policy(seed: int = 1, family: str = "llama") -> PreTrainedModel:
    """A model with weights large enough that every layer, bias and position matters to what it says."""
    model = base_model(settings(family), tokenizer(), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * WIDTH**-0.5)
    return model


def reward_model(seed: int = 1, family: str = "llama") -> PreTrainedModel:
    return new_reward_model(policy(seed, family), settings(family), tokenizer(), seed).eval()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Encoded prompts of many lengths, the shortest of two tokens."""
    rng = random.Random(seed)
    texts = [
        "hello , my kettle is cracked . i am really angry . order number 4 1 7 ."[: rng.randint(1, 70)]
        for _ in range(count)
    ]
    return encode_prompts(tokenizer(), texts)


def random_responses(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, len(tokenizer()), (length,), generator=generator).tolist() for length in lengths]


def params(**sections: dict[str, Any]) -> Params:
    """The tiny recipe with two layers, passes short enough to repeat, an adaptive KL coefficient, and `sections` laid
    over it.
    """
    content = read(ROOT / "tests/e2e/tiny.yaml")
    content["model"]["random"] |= {"layers": 2}
    content["data"]["source"] |= {"sft_rows": 100, "preference_rows": 100}
    content["sft"] |= {"epochs": 3.0, "max_steps": None, "log_every_steps": 1, "checkpoint_every_steps": 4}
    content["reward"] |= {"epochs": 3.0, "max_steps": None, "log_every_steps": 1, "checkpoint_every_steps": 4}
    content["ppo"] |= {
        "updates": 8,
        "checkpoint_every_updates": 3,
        "kl": content["ppo"]["kl"] | {"controller": "adaptive", "horizon": 200},
    }
    for method in ("dpo", "kto"):
        content[method] |= {
            "epochs": 3.0,
            "max_steps": None,
            "log_every_steps": 1,
            "checkpoint_every_steps": 4,
            "learning_rate": 2.0e-3,
        }
    content["rloo"] |= {"updates": 8, "checkpoint_every_updates": 3, "rloo_epochs": 2, "learning_rate": 1.0e-3}
    content["grpo"] |= {"updates": 8, "checkpoint_every_updates": 3, "grpo_epochs": 2, "learning_rate": 1.0e-3}
    for name, section in sections.items():
        under = DISTILL if name == "distill" else content[name]
        other = isinstance(section, dict) and section.get("kind", under.get("kind")) != under.get("kind")
        content[name] = section if other or not isinstance(section, dict) else under | section
    return validate(content, "test")


DISTILL: dict[str, Any] = {
    "student": {
        "path": None,
        "revision": None,
        "random": {
            "family": "qwen3",
            "width": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 2,
            "mlp_width": 32,
            "tie_embeddings": True,
            "rope_theta": 10000.0,
        },
        "layers": None,
    },
    "lora": None,
    "optimizer": "adamw",
    "activation_checkpointing": False,
    "updates": 8,
    "batch_size": 8,
    "responses_per_prompt": 2,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "rollout_batch_size": 8,
    "rollout_engine": "static",
    "num_mini_batches": 2,
    "micro_batch_tokens": 400,
    "learning_rate": 1.0e-2,
    "schedule": "constant",
    "max_grad_norm": 1.0,
    "checkpoint_every_updates": 3,
    "sample_every_updates": 2,
    "sft_updates": 2,
    "lmbda": 0.5,
    "beta": 0.0,
    "distill_epochs": 2,
}
"""A student with a quarter of the teacher's width, half of the responses its own."""


def open_stage(root: Path, name: str) -> tuple[Stage, Callable[[Stage], None]]:
    """The stage begun in `root`, and its work: what the process does, without the process."""
    stage_entry = entry(name)
    stage = Stage(name, stage_entry.sections, stage_entry.inputs, root)
    stage.begin()
    stage.held.close()  # several are opened in one process
    torch.manual_seed(stage.params.seed)
    return stage, stage_entry.work


def work(root: Path, name: str) -> Stage:
    """Run a stage in this process; its exceptions come out."""
    stage, run = open_stage(root, name)
    with torch.set_grad_enabled(name != "evaluate"):
        run(stage)
    stage.meter.close(stage.step)
    return stage


def stop_after_a_step(root: Path, name: str) -> Stage:
    """A stage that was asked to stop before it began, and so went on by one step."""
    stage, run = open_stage(root, name)
    stage.stopper.requested = True
    with pytest.raises(StageStopped):
        run(stage)
    return stage


def run_main(root: Path, name: str) -> int:
    """The exit code of a stage's main function in `root`, this process's signal handlers put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.chdir(root), torch.set_grad_enabled(name != "evaluate"):
            return run_stage(name, *entry(name))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def files(folder: Path) -> dict[str, bytes]:
    """Content of everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder: Path) -> list[str]:
    """What a folder holds, hidden things too."""
    return sorted(path.name for path in folder.iterdir())


def on_a_small_disk(folder: Path, kibibytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a small file system of its own that holds a copy of `folder` and is gone with the command."""
    disk = folder.parent / f"{folder.name}-disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={kibibytes}k tmpfs {disk}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system, so none can be filled")
    script = f'{mount} && cp -r {folder}/. {disk} && cd {disk} && exec "$@"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    isolated = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    return subprocess.run(isolated, capture_output=True, text=True, env=environment, timeout=120, check=False)


def padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Rows as [B, T], and the mask of what is real."""
    longest = max(map(len, rows))
    values = torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows])
    return values, torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
