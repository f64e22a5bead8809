"""What both trainers start from: per size a folder with data, SFT and reward model, made by our own stages and kept
under .bench/.

.bench/work/2M/           recipes/demo.yaml at that size, trained briefly: for speed and gold score
.bench/work/2M-v32000/    the same models with 32,000 vocabulary entries, trained on for a few
                          steps: for memory, where the logits hurt
.bench/work/2M-lora/      the same SFT model, and a reward model that is an adapter on it: for the
                          layout shared_base
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks.projects.checkouts import ROOT
from benchmarks.projects.processes import stage_process
from config import jsonl
from config.compose import compose
from config.load import read, validate, write
from config.methods.registry import stage_module
from config.schema import Params
from training.modeling.adapters import merge
from training.modeling.models import load_reward_model
from training.modeling.tokenizer import encode_prompts, encode_responses, load_tokenizer

RECIPE = ROOT / "recipes" / "demo.yaml"
STAMP = "prepared.json"
LENGTH_FRACTION = 0.4
"""Mean natural response length over max_new_tokens."""
LONG_VOCABULARY = 32_000
LORA = {"rank": 8, "alpha": 16.0, "modules": ["q", "k", "v", "o", "gate", "up", "down"], "dropout": 0.0}
LORA_RATE = 4.0
"""Learning rates of adapters over those of whole weights."""
LONG_VOCABULARY_STEPS = 40
"""SFT steps that teach the model not to say the entries that no text uses."""


class Size(NamedTuple):
    """A Llama shape and how long it is trained; learning rates are the recipe's, times the recipe's width over this
    one's.
    """

    width: int
    layers: int
    heads: int
    mlp_width: int
    sft_steps: int
    reward_steps: int
    updates: int
    batch_size: int


SIZES = {
    "2M": Size(
        width=192, layers=4, heads=6, mlp_width=576, sft_steps=400, reward_steps=600, updates=24, batch_size=128
    ),
    "10M": Size(
        width=384, layers=6, heads=12, mlp_width=896, sft_steps=200, reward_steps=150, updates=6, batch_size=128
    ),
    "40M": Size(
        width=640, layers=8, heads=10, mlp_width=1728, sft_steps=120, reward_steps=60, updates=3, batch_size=64
    ),
}
"""By number of parameters, with the recipe's vocabulary."""


class Workspace(NamedTuple):
    folder: Path
    params: Params
    """What the stages there were run with, and the ppo section of the comparison, before layout and updates are
    set.
    """

    @property
    def digest(self) -> str:
        return str(json.loads((self.folder / STAMP).read_text(encoding="utf-8"))["digest"])

    @property
    def whole_reward(self) -> Path:
        """The reward model with weights of its own."""
        merged = self.folder / "models/reward_whole"
        return merged if merged.exists() else self.folder / "models/reward"

    @property
    def parameters(self) -> int:
        """Of the policy."""
        return int(json.loads((self.folder / "metrics/sft.json").read_text(encoding="utf-8"))["parameters"])

    @property
    def shape(self) -> dict[str, Any]:
        """The policy's config.json."""
        return dict(json.loads((self.folder / "models/sft/config.json").read_text(encoding="utf-8")))


def size_overrides(size: Size, recipe: Params) -> list[str]:
    """`section.key=value` of a size, on top of the recipe."""
    assert recipe.model.random is not None
    scale = recipe.model.random.width / size.width
    shape = {
        "width": size.width,
        "layers": size.layers,
        "heads": size.heads,
        "kv_heads": size.heads,
        "mlp_width": size.mlp_width,
    }
    return [
        *(f"model.random.{name}={value}" for name, value in shape.items()),
        # Speed does not depend on the rows: few are prepared in seconds.
        "data.source.preference_rows=4000",
        "reward.epochs=4.0",
        f"sft.max_steps={size.sft_steps}",
        f"sft.learning_rate={recipe.sft.learning_rate * scale}",
        f"reward.max_steps={size.reward_steps}",
        f"reward.learning_rate={recipe.reward.learning_rate * scale}",
        # Half the recipe's: without gradient clipping the KL of either side jumps at the whole rate.
        f"ppo.learning_rate={recipe.ppo.learning_rate * scale / 2}",
        f"ppo.value_learning_rate={recipe.ppo.learning_rate * scale / 2}",
        f"ppo.batch_size={size.batch_size}",
        f"ppo.rollout_batch_size={size.batch_size}",
        f"ppo.updates={size.updates}",
        # What TRL's PPO has no counterpart for is off, gradient clipping included.
        "ppo.max_grad_norm=1.0e9",
        "ppo.responses_per_prompt=1",
        "ppo.score_clip=null",
        "ppo.target_kl=null",
        "ppo.max_kl=null",
        "ppo.kl.controller=fixed",
        "ppo.value_init=reward",
        "ppo.sample_every_updates=1",
        "ppo.checkpoint_every_updates=1000000",
    ]


def prepared(name: str, size: Size, extra: list[str], root: Path, environment: Mapping[str, str]) -> Workspace:
    """Data, SFT and reward model of a size: found under `root`, or made (minutes for 2M, an hour for 40M on two
    cores).
    """
    recipe = read(RECIPE)
    content = compose(recipe, {}, [*size_overrides(size, validate(recipe, str(RECIPE))), *extra])
    return _made(root / name, content, environment)


def long_vocabulary(name: str, short: Workspace, root: Path, environment: Mapping[str, str]) -> Workspace:
    """The models of `short` with LONG_VOCABULARY entries, the further ones copies of a token that no text uses."""
    folder = root / f"{name}-v{LONG_VOCABULARY}"
    base = folder / "base"
    overrides = ["model.random=null", "model.path=./base", "reward.init=sft"]
    overrides += [f"{stage}.max_steps={LONG_VOCABULARY_STEPS}" for stage in ("sft", "reward")]
    overrides += [
        f"{stage}.learning_rate={getattr(short.params, stage).learning_rate / 4}" for stage in ("sft", "reward")
    ]
    content = compose(short.params.model_dump(mode="json"), {}, overrides)

    def extend() -> None:
        tokenizer = load_tokenizer(short.folder / "data/tokenizer")
        model = AutoModelForCausalLM.from_pretrained(short.folder / "models/sft")
        input_embeddings = model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(LONG_VOCABULARY, mean_resizing=False)
        with torch.no_grad():
            for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
                embedding.weight[input_embeddings:] = embedding.weight[tokenizer.convert_tokens_to_ids("<spare>")]
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)

    return _made(folder, content, environment, extend, origin=short.digest)


def with_adapters(short: Workspace, environment: Mapping[str, str]) -> Workspace:
    """The SFT model of `short` with a reward model that is an adapter on it.

    models/reward_whole is the same reward model with weights of its own: what TRL can load.
    """
    folder = short.folder.with_name(f"{short.folder.name}-lora")
    rates = [
        f"{stage}.learning_rate={getattr(short.params, section).learning_rate * LORA_RATE}"
        for stage, section in (("reward", "reward"), ("ppo", "ppo"))
    ]
    rates.append(f"ppo.value_learning_rate={short.params.ppo.value_learning_rate * LORA_RATE}")
    content = compose(
        short.params.model_dump(mode="json"),
        {},
        [f"reward.lora={LORA}", f"ppo.lora={LORA}", "reward.init=sft", *rates],
    )
    params = validate(content, str(folder))
    made_from = [content[name] for name in ("seed", "model", "data", "sft", "reward")]
    digest = hashlib.sha256(json.dumps([made_from, short.digest], sort_keys=True).encode()).hexdigest()
    stamp = folder / STAMP
    if not (stamp.exists() and json.loads(stamp.read_text(encoding="utf-8"))["digest"] == digest):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "models").mkdir(parents=True)
        for part in ("data", "models/sft", "metrics"):
            (folder / part).symlink_to(short.folder / part)
        write(params, folder / "params.yaml")
        stage_process(folder, "training.reward", environment)
        model = merge(
            load_reward_model(folder / "models/reward", params.model, load_tokenizer(folder / "data/tokenizer"))
        )
        model.save_pretrained(folder / "models/reward_whole")
        stamp.write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")
    return Workspace(folder, params)


def _made(
    folder: Path,
    content: dict[str, Any],
    environment: Mapping[str, str],
    before: Callable[[], None] | None = None,
    origin: str = "",
) -> Workspace:
    """The workspace in `folder`, made again if the params or the `origin` it was made from are not the same.

    Code does not count: both trainers start from the same models, however these were trained.
    """
    made_from = {name: content[name] for name in ("seed", "model", "data", "sft", "reward")}
    digest = hashlib.sha256(json.dumps([made_from, origin], sort_keys=True).encode()).hexdigest()
    stamp = folder / STAMP
    if not (stamp.exists() and json.loads(stamp.read_text(encoding="utf-8"))["digest"] == digest):
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        if before is not None:
            before()
        write(validate(content, str(folder)), folder / "params.yaml")
        stage_process(folder, "training.data", environment)
        lengths = _length_overrides(folder)
        fitted = validate(compose(content, {}, lengths), str(folder))
        write(fitted, folder / "params.yaml")
        for stage in ("sft", "reward"):
            stage_process(folder, stage_module(stage), environment)
        stamp.write_text(json.dumps({"digest": digest, "lengths": lengths}) + "\n", encoding="utf-8")
    content = compose(content, {}, json.loads(stamp.read_text(encoding="utf-8"))["lengths"])
    return Workspace(folder, validate(content, str(folder)))


def _length_overrides(folder: Path) -> list[str]:
    """Limits that make the data's mean response LENGTH_FRACTION of max_new_tokens, and a context that holds the
    longest prompt too.
    """
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    rows = list(jsonl.plain(folder / "data/prepared/sft/train.jsonl"))
    responses = [len(ids) for ids in encode_responses(tokenizer, [row["completion"] for row in rows])]
    prompts = [len(ids) for ids in encode_prompts(tokenizer, [row["prompt"] for row in rows])]
    max_new_tokens = math.ceil(sum(responses) / len(responses) / LENGTH_FRACTION)
    context = max(prompts) + max(max_new_tokens, *responses) + 1
    return [
        *(
            f"{name}={context}"
            for name in ("model.context_length", "sft.max_length", "reward.max_length", "dpo.max_length")
        ),
        *(f"{name}.max_new_tokens={max_new_tokens}" for name in ("ppo", "rloo", "grpo", "evaluate")),
    ]
