import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from torch import nn

from config.errors import EnvironmentFault
from config.load import write
from config.schema import Params
from tests.training.rl.test_layouts import LORA, adapted, lora_project  # noqa: F401 # fixtures
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import files, open_stage, params, policy, settings, tokenizer, work
from training import ppo as ppo_module
from training.modeling.adapters import AdapterView
from training.modeling.low_bit import optimizer, quantisation, require_bitsandbytes
from training.modeling.models import base_model, load_policy
from training.modeling.tokenizer import load_tokenizer
from training.rl.layouts import load_roles
from training.rl.roles import Models, Roles

Project = Callable[..., Path]
IDS = torch.tensor([[5, 9, 14, 200]])


def nf4_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, Linear4bit)}


@pytest.fixture(scope="session")
def wide(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of matrices whose rows are whole blocks, in which sft and reward (an adapter) have run. Read it."""
    root = tmp_path_factory.mktemp("wide") / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints", "models"))
    write(wide_params(), root / "params.yaml")
    for stage in ("sft", "reward"):
        work(root, stage)
    return root


def wide_params(ppo: dict[str, Any] | None = None, quantisation: str | None = None) -> Params:
    shape = params().model.random
    assert shape is not None
    random = shape.model_dump() | {"width": 64, "mlp_width": 128}
    short = {"max_steps": 6}
    return params(
        model={"random": random, "quantisation": quantisation},
        sft=short,
        reward=short | {"lora": LORA},
        ppo={"lora": LORA, "learning_rate": 0.003, "updates": 3} | (ppo or {}),
    )


# ---------------------------------------------------------------- four bits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_frozen_models_matrices_take_four_bits_and_its_head_and_embedding_none_less(
    family: str, tmp_path: Path
) -> None:
    assert settings(family).random is not None
    wide = settings(family).random.model_copy(update={"width": 64, "mlp_width": 128})  # type: ignore[union-attr]
    model = base_model(settings(family).model_copy(update={"random": wide}), tokenizer(), seed=1)
    model.save_pretrained(tmp_path / "model")
    chosen = settings(family).model_copy(update={"quantisation": "nf4"})
    stored = load_policy(tmp_path / "model", chosen, tokenizer()).eval()
    packed = nf4_weights(stored)
    assert len(packed) == 2 * (4 if family == "gpt2" else 7)
    assert all(weight.dtype == torch.uint8 for weight in packed.values())
    name = next(iter(packed))
    assert packed[name].numel() * 2 == model.get_submodule(name).weight.numel()
    assert type(stored.get_output_embeddings()) is nn.Linear
    assert torch.equal(stored.get_input_embeddings().weight, model.get_input_embeddings().weight)
    kept = dequantize_4bit(packed[name], stored.get_submodule(name).weight.quant_state)
    original = model.get_submodule(name).weight.detach()
    original = original.T if family == "gpt2" else original
    # sixteen levels for a normal distribution
    assert 0.03 < float((kept - original).norm() / original.norm()) < 0.12


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="which files are mapped is read from /proc")
def test_a_quantised_model_holds_nothing_of_the_file_it_was_read_from(tmp_path: Path) -> None:
    wide = settings().random.model_copy(update={"width": 64, "mlp_width": 128})  # type: ignore[union-attr]
    base_model(settings().model_copy(update={"random": wide}), tokenizer(), seed=1).save_pretrained(tmp_path / "model")
    chosen = settings().model_copy(update={"quantisation": "nf4"})
    stored = load_policy(tmp_path / "model", chosen, tokenizer())
    assert str(tmp_path / "model") not in Path("/proc/self/maps").read_text()
    del stored


def test_a_model_that_learns_whole_is_not_quantised(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "model")
    chosen = settings().model_copy(update={"quantisation": "nf4"})
    assert not nf4_weights(load_policy(tmp_path / "model", chosen, tokenizer(), trainable=True))


def test_rows_that_a_cpu_reads_wrongly_are_refused(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "model")
    chosen = settings().model_copy(update={"quantisation": "nf4"})
    with pytest.raises(
        EnvironmentFault, match=r"q_proj of .*model has rows of 32 weights.* multiples of 64 .*quantisation: null"
    ) as error:
        load_policy(tmp_path / "model", chosen, tokenizer())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["separate", "shared_base"])
def test_ppo_learns_on_a_base_of_four_bits_that_stays_as_it_was(wide: Path, tmp_path: Path, layout: str) -> None:
    root = tmp_path / "project"
    shutil.copytree(wide, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    write(wide_params({"layout": layout}, "nf4"), root / "params.yaml")
    stage, run = open_stage(root, "ppo")
    kept: list[Roles] = []
    first: list[dict[str, torch.Tensor]] = []
    load = ppo_module.load_roles

    def keeping(*given: Any) -> Roles:
        kept.append(load(*given))
        first.append(nf4_weights(kept[0].policy.model))
        return kept[0]

    ppo_module.load_roles = keeping
    try:
        run(stage)
    finally:
        ppo_module.load_roles = load
    rows = [row.values for row in metric_rows(root, "ppo")]
    assert len(rows) == 3
    assert all(math.isfinite(row[name]) for row in rows for name in ("policy_loss", "value_loss", "kl", "entropy"))
    assert rows[0]["first_ratio_error"] == pytest.approx(0, abs=1e-4)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(rows[-1]["kl"]) > 1e-5
    after = nf4_weights(kept[0].policy.model)
    assert len(after) == 14
    assert all(torch.equal(after[name], weight) for name, weight in first[0].items())
    assert files(root / "models/sft") == files(wide / "models/sft")
    assert "quantization" not in (root / "models/ppo/config.json").read_text()
    work(root, "evaluate")
    assert metrics(root, "evaluate")["kl"] < 1.0  # against the same four bits


def test_sft_and_reward_learn_on_four_bits_with_adapters_in_fp32(wide: Path, tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(wide, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    base = {"path": str(wide / "models/sft"), "random": None, "quantisation": "nf4"}
    changes = {"lora": LORA, "max_steps": 4, "optimizer": "adamw8bit"}
    write(params(model=base, sft=changes, reward=changes, ppo={"lora": LORA}), root / "params.yaml")
    for name in ("sft", "reward"):
        work(root, name)
        rows = [row.values["loss"] for row in metric_rows(root, name) if "loss" in row.values]
        assert len(rows) == 4
        assert all(math.isfinite(loss) for loss in rows)
    stage, _ = open_stage(root, "reward")
    loaded = load_policy(root / "models/sft", stage.params.model, load_tokenizer(root / "data/tokenizer"))
    stored = load_file(root / "models/sft/adapter_model.safetensors")
    assert all(p.dtype == torch.float32 for p in stored.values())
    assert any(float(p.abs().max()) > 0 for name, p in stored.items() if "lora_B" in name)
    assert not all(torch.equal(p, p.bfloat16().float()) for name, p in stored.items() if "lora_B" in name)
    assert len(nf4_weights(loaded)) == 14


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ppo_learns_in_half_precision_with_adapters_in_fp32(
    lora_project: Project,  # noqa: F811
    dtype: str,
) -> None:
    root = lora_project(model={"dtype": dtype}, updates=2, batch_size=4, rollout_batch_size=4)
    stage, _ = open_stage(root, "ppo")
    roles = load_roles(stage, load_tokenizer(root / "data/tokenizer"))
    assert isinstance(roles.policy, AdapterView)
    assert roles.policy.model.model.embed_tokens.weight.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert all(p.dtype == torch.float32 for p in roles.trainable().values())
    assert roles.scaler.is_enabled() is (dtype == "fp16")
    work(root, "ppo")
    rows = [row.values for row in metric_rows(root, "ppo")]
    assert len(rows) == 2
    assert all(math.isfinite(row[name]) for row in rows for name in ("policy_loss", "value_loss", "kl", "grad_norm"))
    assert rows[0]["first_ratio_error"] == pytest.approx(0, abs=0.1)  # eight bits of mantissa


class Scaled(nn.Module):
    """Just enough of a model to hold one weight."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_a_gradient_too_large_for_fp16_halves_the_loss_scale_and_takes_no_step(project: Project) -> None:
    chosen = open_stage(project("ppo"), "ppo")[0].params.ppo
    models = [Scaled() for _ in range(4)]
    roles = Roles(Models(models[0], models[1], models[2], models[3], None), chosen, "fp16")
    roles.backward((models[0].weight * 2.0).sum() + (models[3].weight * 2.0).sum())
    start = roles.scaler.get_scale()
    assert float(models[0].weight.grad[0]) == 2.0 * start
    assert roles.step(1e9) == pytest.approx(4.0)  # the norm without the scale: sqrt(4 x 2^2)
    moved = models[0].weight.detach().clone()
    assert float((1.0 - moved[0]).detach()) == pytest.approx(chosen.learning_rate, rel=1e-3)
    roles.backward((models[0].weight * math.inf).sum() + models[3].weight.sum())
    assert roles.step(1e9) == 0.0
    assert roles.scaler.get_scale() == start / 2
    assert torch.equal(models[0].weight, moved)
    while roles.scaler.get_scale() > 1.0:
        roles.backward((models[0].weight * math.inf).sum() + models[3].weight.sum())
        assert roles.step(1e9) == 0.0
    roles.backward((models[0].weight * math.inf).sum() + models[3].weight.sum())
    assert not math.isfinite(roles.step(1e9))


# ---------------------------------------------------------------- eight bits


def test_the_eight_bit_optimizer_follows_the_exact_one_with_a_quarter_of_its_state() -> None:
    ends, states = [], []
    for name in ("adamw", "adamw8bit"):
        weight = nn.Parameter(torch.linspace(-1, 1, 8192))
        picked = optimizer(name, [{"params": [weight], "lr": 0.01}], "ppo.optimizer")  # type: ignore[arg-type]
        target = torch.sin(torch.arange(8192.0))
        for _ in range(20):
            ((weight - target) ** 2).sum().backward()
            picked.step()
            picked.zero_grad()
        ends.append(weight.detach())
        states.append(
            sum(
                t.nbytes for s in picked.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() >= 8192
            )
        )
    moved = float((ends[0] - torch.linspace(-1, 1, 8192)).abs().mean())
    assert moved > 0.1
    assert float((ends[1] - ends[0]).abs().mean()) < 0.1 * moved
    assert states == [2 * 4 * 8192, 2 * 8192]


def test_without_bitsandbytes_the_parameter_that_asks_for_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_bitsandbytes("model.quantisation=nf4", "model.quantisation: null")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    chosen = settings().model_copy(update={"quantisation": "nf4"})
    with pytest.raises(
        EnvironmentFault, match=r"model\.quantisation=nf4 needs the package bitsandbytes.* model\.quantisation: null"
    ):
        quantisation(chosen, torch.float32)
    with pytest.raises(EnvironmentFault, match=r"ppo\.optimizer=adamw8bit .* ppo\.optimizer: adamw "):
        optimizer("adamw8bit", [], "ppo.optimizer")
