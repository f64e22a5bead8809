import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from config.errors import EnvironmentFault, ModelError, StageStopped
from config.sections.levers import Lora
from tests.training.processes import metric_rows, metrics
from tests.training.tiny import FAMILIES, files, open_stage, policy, settings, tokenizer, work
from training.distributed import shards
from training.distributed.model_files import save_adapter
from training.modeling.adapter_lineage import CONFIG, lineage, named_base
from training.modeling.adapters import (
    WEIGHTS,
    activate,
    active,
    adapter_parameters,
    add_adapter,
    lora_layers,
    matrices,
)
from training.modeling.models import load_policy, load_reward_model

IDS = torch.tensor([[5, 9, 14, 200]])
LORA = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "down"], "dropout": 0.0}
Project = Callable[..., Path]


def lora(**changes: Any) -> Lora:
    return Lora.model_validate(LORA | changes)


@torch.no_grad()
def says(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def stir(model: PreTrainedModel, name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in adapter_parameters(model, name).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


# ---------------------------------------------------------------- in memory


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj", "self_attn.v_proj"]),
        ("qwen2", ["mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj", "self_attn.v_proj"]),
    ],
)
def test_our_names_of_matrices_are_those_of_the_family(family: str, expected: list[str]) -> None:
    assert matrices(policy(family=family), ["q", "v", "down", "gate"], "sft.lora") == expected


def test_a_packed_matrix_stands_for_all_of_its_parts_and_own_names_are_understood() -> None:
    assert matrices(policy(family="gpt2"), ["v"], "sft.lora") == ["attn.c_attn"]
    assert matrices(policy(family="gpt2"), ["o"], "sft.lora") == ["attn.c_proj"]
    assert matrices(policy(family="gpt2"), ["down", "mlp.c_fc"], "sft.lora") == [
        "mlp.c_fc",
        "mlp.c_proj",
    ]
    with pytest.raises(
        ModelError,
        match=r"'gate' is no matrix of this model .GPT2LMHeadModel.\. It has q, k, v, o, up, down;",
    ):
        matrices(policy(family="gpt2"), ["gate"], "sft.lora")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_one_on_top_of_another_adds_to_it(family: str) -> None:
    model = policy(family=family)
    base = says(model)
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    assert torch.equal(says(model), base)
    stir(model, "sft")
    one = says(model)
    assert float((one - base).abs().max()) > 0.1
    add_adapter(model, lora(rank=2, modules=["k", "down"]), "policy", 1, "ppo.lora")
    assert active(model) == ("sft", "policy")
    assert torch.equal(says(model), one)
    stir(model, "policy")
    assert float((says(model) - one).abs().max()) > 0.1
    activate(lora_layers(model), ("sft",))
    assert torch.equal(says(model), one)
    activate(lora_layers(model), ())
    assert torch.equal(says(model), base)


def test_an_adapter_adds_alpha_over_rank_times_b_times_a() -> None:
    model = policy()
    add_adapter(model, lora(modules=["q"], alpha=6.0), "sft", 1, "sft.lora")
    stir(model, "sft")
    layer = model.model.layers[0].self_attn.q_proj
    whole = layer.weight + 6.0 / 4 * layer.lora_B["sft"].weight @ layer.lora_A["sft"].weight
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), x @ whole.T)


def test_the_first_weights_of_an_adapter_come_from_its_seed_alone() -> None:
    drawn = []
    for seed, before in ((1, 0), (1, 5), (2, 0)):
        model = policy()
        torch.manual_seed(before)
        state = torch.random.get_rng_state()
        add_adapter(model, lora(), "sft", seed, "sft.lora")
        assert torch.equal(torch.random.get_rng_state(), state)
        drawn.append(torch.cat([p.flatten() for p in adapter_parameters(model, "sft").values()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---------------------------------------------------------------- folders


@pytest.fixture(params=FAMILIES)
def stacked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A model with two adapters on each other, and models/{base,sft,ppo}."""
    model, root = policy(family=request.param), tmp_path / "models"
    policy(family=request.param).save_pretrained(root / "base")
    for name, base in (("sft", "base"), ("ppo", "sft")):
        add_adapter(model, lora(rank=2 + len(name)), name, 1, "sft.lora")
        stir(model, name)
        save_adapter(root / name, model, name, named_base(root / base, root / name), None)
    return model, root


def test_a_stack_of_adapters_says_the_same_after_a_reload_and_a_move(
    stacked: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, root = stacked
    shutil.move(root, tmp_path / "moved")
    loaded = load_policy(
        tmp_path / "moved/ppo", settings(model.config.model_type), tokenizer()
    ).eval()
    assert active(loaded) == ("sft", "ppo")
    assert torch.equal(says(loaded), says(model))
    found = lineage(tmp_path / "moved/ppo")
    assert (found.base, [folder.name for folder in found.adapters]) == (
        tmp_path / "moved/base",
        ["sft", "ppo"],
    )


def test_a_model_that_learns_whole_has_its_adapters_merged(
    stacked: tuple[PreTrainedModel, Path],
) -> None:
    model, root = stacked
    loaded = load_policy(
        root / "ppo", settings(model.config.model_type), tokenizer(), trainable=True
    ).eval()
    assert not lora_layers(loaded)
    assert all(p.requires_grad for p in loaded.parameters())
    torch.testing.assert_close(says(loaded), says(model), atol=1e-4, rtol=0)


def test_peft_reads_our_folders(stacked: tuple[PreTrainedModel, Path]) -> None:
    model, root = stacked
    activate(lora_layers(model), ("sft",))
    loaded = PeftModel.from_pretrained(policy(family=model.config.model_type), root / "sft").eval()
    assert torch.equal(says(loaded), says(model))


def test_the_same_adapter_has_the_same_bytes(
    stacked: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, root = stacked
    save_adapter(tmp_path / "again", model, "ppo", "../sft", None)
    assert files(tmp_path / "again") == files(root / "ppo")
    config = json.loads((root / "ppo" / CONFIG).read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert str(tmp_path) not in "".join(path.read_text() for path in (root / "ppo").glob("*.json"))


def cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:500])


def lose_one(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(dict(list(weights.items())[1:]), folder / WEIGHTS)


def widen_one(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros(7, 7)}, folder / WEIGHTS)


def garble_config(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def name_no_base(folder: Path) -> None:
    (folder / CONFIG).write_text(
        json.dumps({**json.loads((folder / CONFIG).read_text()), "base_model_name_or_path": None})
    )


def stand_on_itself(folder: Path) -> None:
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace('"../sft"', '"../ppo"'))


def lose_the_base(folder: Path) -> None:
    shutil.rmtree(folder.parent / "base")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_weights, "damaged weights"),
        (lose_one, "does not fit its base: .*lora_"),
        (widen_one, "does not fit its base: .*lora_"),
        (garble_config, "is damaged or names no base"),
        (name_no_base, "is damaged or names no base"),
        (stand_on_itself, "stands on itself"),
        (lose_the_base, "base does not exist"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line_that_names_it(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    model = policy()
    policy().save_pretrained(tmp_path / "base")
    for name, base in (("sft", "../base"), ("ppo", "../sft")):
        add_adapter(model, lora(), name, 1, "sft.lora")
        save_adapter(tmp_path / name, model, name, base, None)
    damage(tmp_path / "ppo")
    with pytest.raises(ModelError, match=said) as error:
        load_policy(tmp_path / "ppo", settings(), tokenizer())
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_base_is_named_relative_to_the_adapter_unless_it_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "models/sft").mkdir(parents=True)
    assert named_base(tmp_path / "models/sft", tmp_path / "models/ppo") == "../sft"
    assert named_base("organisation/model", tmp_path / "models/sft") == "organisation/model"
    assert named_base(str(tmp_path / "models/sft"), tmp_path / "models/ppo") == str(
        tmp_path / "models/sft"
    )


# ---------------------------------------------------------------- stages


@pytest.fixture
def on_a_base(project: Project, finished: Path) -> Project:
    """A project before `stage` whose model.path is the finished project's SFT model, kept in
    base/.
    """

    def make(stage: str, name: str = "project", **sections: Any) -> Path:
        base = finished.parent / "base-of-adapters"
        if not base.exists():
            shutil.copytree(finished / "models/sft", base)
        model = {"path": str(base), "random": None} | sections.pop("model", {})
        return project(stage, name, model=model, **sections)

    return make


def test_sft_and_reward_learn_as_adapters_on_one_base_and_say_the_same_when_loaded(
    on_a_base: Project,
) -> None:
    root = on_a_base(
        "sft", sft={"lora": LORA | {"dropout": 0.1}}, reward={"lora": LORA | {"rank": 2}}
    )
    work(root, "sft")
    rows = [row.values["loss"] for row in metric_rows(root, "sft") if "loss" in row.values]
    assert sum(rows[-3:]) < sum(rows[:3])
    # layers x rank x (inputs + outputs) of q, v, down
    assert metrics(root, "sft")["learning_parameters"] == 2 * 4 * (64 + 64 + 96)
    work(root, "reward")
    kept = load_file(root / "models/reward" / WEIGHTS)
    assert len(kept) == 2 * 2 * 3 + 1
    assert float(kept["base_model.model.score.weight"].abs().max()) > 0
    found = lineage(root / "models/reward")
    assert [folder.name for folder in found.adapters] == ["sft", "reward"]
    params_model = open_stage(root, "reward")[0].params.model
    loaded = load_reward_model(root / "models/reward", params_model, tokenizer()).eval()
    assert active(loaded) == ("sft", "reward")
    config = json.loads((root / "models/reward/config.json").read_text())
    assert loaded.config.score_std == config["score_std"] == metrics(root, "reward")["score_std"]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stopped_stage_with_adapters_ends_with_the_bits_of_the_undisturbed_one(
    on_a_base: Project, stage: str
) -> None:
    changes = {"lora": LORA | {"dropout": 0.1}, "max_steps": 6}
    straight, stopped = (
        on_a_base(stage, name, **{stage: changes}) for name in ("straight", "stopped")
    )
    work(straight, stage)
    begun, run = open_stage(stopped, stage)
    begun.stop_requested = True
    with pytest.raises(StageStopped):
        run(begun)
    saved = begun.checkpoints.latest()
    assert saved is not None
    assert not list(saved.path.glob("model*.safetensors"))
    parts = [load_file(path) for path in (saved.path / shards.WEIGHTS).glob("*.safetensors")]
    assert len({name for part in parts for name in part}) == 12 + (stage == "reward")
    work(stopped, stage)
    assert files(stopped / "models" / stage) == files(straight / "models" / stage)


def test_fp16_without_a_gpu_is_refused_before_anything_is_trained(project: Project) -> None:
    stage, run = open_stage(project("sft", model={"dtype": "fp16"}), "sft")
    with pytest.raises(EnvironmentFault, match=r"model\.dtype=fp16: sft .* model\.dtype: fp32"):
        run(stage)
