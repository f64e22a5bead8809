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

from config.errors import EnvironmentFault, ModelError
from config.sections.levers import Lora
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import (
    FAMILIES,
    files,
    open_stage,
    policy,
    settings,
    stop_after_a_step,
    tokenizer,
    work,
)
from training.distributed import shards
from training.distributed.model_files import save_adapter
from training.modeling.adapter_base import CONFIG, Base, base_of, named_base
from training.modeling.adapters import (
    WEIGHTS,
    activate,
    active,
    adapter_parameters,
    add_adapter,
    begin_adapter,
    lora_layers,
    matrix_names,
    train_only_adapter,
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
    assert matrix_names(policy(family=family), ["q", "v", "down", "gate"], "sft.lora") == expected


def test_a_packed_matrix_stands_for_all_of_its_parts_and_own_names_are_understood() -> None:
    assert matrix_names(policy(family="gpt2"), ["v"], "sft.lora") == ["attn.c_attn"]
    assert matrix_names(policy(family="gpt2"), ["o"], "sft.lora") == ["attn.c_proj"]
    assert matrix_names(policy(family="gpt2"), ["down", "mlp.c_fc"], "sft.lora") == ["mlp.c_fc", "mlp.c_proj"]
    with pytest.raises(
        ModelError, match=r"'gate' is not a matrix of this model .GPT2LMHeadModel.\. It has q, k, v, o, up"
    ):
        matrix_names(policy(family="gpt2"), ["gate"], "sft.lora")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_one_at_a_time_is_on(family: str) -> None:
    model = policy(family=family)
    base = says(model)
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    assert torch.equal(says(model), base)
    stir(model, "sft")
    first = says(model)
    assert float((first - base).abs().max()) > 0.1
    add_adapter(model, lora(rank=2, modules=["k", "down"]), "policy", 1, "ppo.lora")
    assert active(lora_layers(model)) == "policy"
    assert torch.equal(says(model), base)
    stir(model, "policy")
    assert float((says(model) - first).abs().max()) > 0.1
    activate(lora_layers(model), "sft")
    assert torch.equal(says(model), first)
    activate(lora_layers(model), None)
    assert active(lora_layers(model)) is None
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
    sampled = []
    for seed, before in ((1, 0), (1, 5), (2, 0)):
        model = policy()
        torch.manual_seed(before)
        state = torch.random.get_rng_state()
        add_adapter(model, lora(), "sft", seed, "sft.lora")
        assert torch.equal(torch.random.get_rng_state(), state)
        sampled.append(torch.cat([p.flatten() for p in adapter_parameters(model, "sft").values()]))
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


# ---------------------------------------------------------------- folders


@pytest.fixture(params=FAMILIES)
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A model with two adapters, ppo begun as a copy of sft and on, and models/{base,sft,ppo}."""
    model, root = policy(family=request.param), tmp_path / "models"
    policy(family=request.param).save_pretrained(root / "base")
    for name, start in (("sft", root / "base"), ("ppo", root / "sft")):
        begin_adapter(model, lora(), name, 1, f"{name}.lora", start)
        stir(model, name)
        save_adapter(root / name, model, name, *named_base(start, root / name))
    return model, root


def test_an_adapter_says_the_same_after_a_reload_and_a_move(
    adapted: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, root = adapted
    shutil.move(root, tmp_path / "moved")
    loaded = load_policy(tmp_path / "moved/ppo", settings(model.config.model_type), tokenizer()).eval()
    assert list(loaded.peft_config) == [active(lora_layers(loaded))]
    assert torch.equal(says(loaded), says(model))
    assert base_of(tmp_path / "moved/ppo") == Base(tmp_path / "moved/base", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_begins_as_a_copy_that_learns_apart(tmp_path: Path, family: str) -> None:
    start, model = tmp_path / "sft", policy(family=family).requires_grad_(False)
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    stir(model, "sft")
    save_adapter(start, model, "sft", "../base", None)
    expected = says(model)
    train_only_adapter(model, lora(), "policy", 1, start)
    assert active(lora_layers(model)) == "policy"
    assert torch.equal(says(model), expected)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == set(adapter_parameters(model, "policy"))
    stir(model, "policy")
    assert float((says(model) - expected).abs().max()) > 0.1
    activate(lora_layers(model), "sft")
    assert torch.equal(says(model), expected)


def test_a_copy_has_the_dropout_of_its_own_stage_and_a_model_at_rest_has_none(tmp_path: Path) -> None:
    model = policy()
    add_adapter(model, lora(dropout=0.9), "sft", 1, "sft.lora")
    stir(model, "sft")
    save_adapter(tmp_path / "sft", model, "sft", "../base", None)
    model = policy()
    begin_adapter(model, lora(dropout=0.5), "dpo", 1, "dpo.lora", tmp_path / "sft")
    assert torch.equal(says(model), says(model))
    assert not torch.equal(says(model.train()), says(model))
    assert {layer.lora_dropout["dpo"].p for layer in lora_layers(model)} == {0.5}
    still = policy()
    begin_adapter(still, lora(), "ppo", 1, "ppo.lora", tmp_path / "sft")
    assert torch.equal(says(still.train()), says(still))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, r"dpo\.lora\.rank is 2, and the adapter in .*sft has 4:"),
        ({"alpha": 4.0}, r"dpo\.lora\.alpha is 4\.0, and the adapter in .*sft has 8\.0:"),
        ({"modules": ["q", "v"]}, r"dpo\.lora\.modules is \['self_attn\.q_proj', .*mlp\.down_proj"),
    ],
)
def test_an_adapter_that_could_not_be_a_copy_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    model = policy()
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    save_adapter(tmp_path / "sft", model, "sft", "../base", None)
    with pytest.raises(ModelError, match=said) as error:
        begin_adapter(policy(), lora(**change), "dpo", 1, "dpo.lora", tmp_path / "sft")
    assert "\n" not in str(error.value)


def test_an_adapter_on_an_adapter_is_refused_with_what_to_do(adapted: tuple[PreTrainedModel, Path]) -> None:
    """As the stages of earlier versions left them."""
    _, root = adapted
    config = root / "ppo" / CONFIG
    config.write_text(config.read_text().replace("../base", "../sft"))
    for use in (
        lambda: load_policy(root / "ppo", settings(), tokenizer()),
        lambda: named_base(root / "ppo", root / "dpo"),
    ):
        with pytest.raises(ModelError, match=r"ppo is an adapter of .*sft, which is itself an adapter") as error:
            use()
        assert str(error.value).endswith("sft first.")
        assert "\n" not in str(error.value)


def test_a_model_that_learns_whole_has_its_adapter_merged(adapted: tuple[PreTrainedModel, Path]) -> None:
    model, root = adapted
    loaded = load_policy(root / "ppo", settings(model.config.model_type), tokenizer(), trainable=True).eval()
    assert not lora_layers(loaded)
    assert all(p.requires_grad for p in loaded.parameters())
    torch.testing.assert_close(says(loaded), says(model), atol=1e-4, rtol=0)


def test_peft_reads_our_folders(adapted: tuple[PreTrainedModel, Path]) -> None:
    model, root = adapted
    for name in ("sft", "ppo"):
        activate(lora_layers(model), name)
        base = policy(family=model.config.model_type)
        loaded = PeftModel.from_pretrained(base, root / name).eval()
        assert torch.equal(says(loaded), says(model))


def test_the_same_adapter_has_the_same_bytes(adapted: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, root = adapted
    save_adapter(tmp_path / "again", model, "ppo", "../base", None)
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
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace('"../base"', '"../ppo"'))


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
        (stand_on_itself, "is an adapter of .*ppo, which is itself an adapter"),
        (lose_the_base, "base does not exist"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line_that_names_it(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    model = policy()
    policy().save_pretrained(tmp_path / "base")
    add_adapter(model, lora(), "ppo", 1, "ppo.lora")
    save_adapter(tmp_path / "ppo", model, "ppo", "../base", None)
    damage(tmp_path / "ppo")
    with pytest.raises(ModelError, match=said) as error:
        load_policy(tmp_path / "ppo", settings(), tokenizer())
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_base_is_named_relative_to_the_adapter_unless_it_is_elsewhere(tmp_path: Path) -> None:
    sft, ppo = tmp_path / "models/sft", tmp_path / "models/ppo"
    sft.mkdir(parents=True)
    assert named_base(sft, ppo) == ("../sft", None)
    assert named_base("organisation/model", sft, "v2") == ("organisation/model", "v2")
    assert named_base(str(sft), ppo) == (str(sft), None)


@pytest.mark.parametrize("base", ["../../base", "organisation/model", "/elsewhere/base"])
def test_an_adapter_that_begins_from_another_names_the_same_base(tmp_path: Path, base: str) -> None:
    model, sft = policy(), tmp_path / "models/sft"
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    save_adapter(sft, model, "sft", base, "v2")
    (tmp_path / "base").mkdir()
    assert named_base(sft, tmp_path / "models/ppo") == (base, "v2")
    assert named_base(sft, tmp_path / "champions/deep/er") == (base.replace("../../", "../../../"), "v2")


# ---------------------------------------------------------------- stages


@pytest.fixture
def on_a_base(project: Project, finished: Path) -> Project:
    """A project before `stage` whose model.path is the finished project's SFT model, kept in base/."""

    def make(stage: str, name: str = "project", **sections: Any) -> Path:
        base = finished.parent / "base-of-adapters"
        if not base.exists():
            shutil.copytree(finished / "models/sft", base)
        model = {"path": str(base), "random": None} | sections.pop("model", {})
        return project(stage, name, model=model, **sections)

    return make


def test_sft_and_reward_learn_as_adapters_on_one_base_and_say_the_same_when_loaded(on_a_base: Project) -> None:
    root = on_a_base("sft", sft={"lora": LORA | {"dropout": 0.1}}, reward={"lora": LORA | {"dropout": 0.2}})
    work(root, "sft")
    rows = [row.values["loss"] for row in metric_rows(root, "sft") if "loss" in row.values]
    assert sum(rows[-3:]) < sum(rows[:3])
    # layers x rank x (inputs + outputs) of q, v, down
    assert metrics(root, "sft")["learning_parameters"] == 2 * 4 * (64 + 64 + 96)
    work(root, "reward")
    kept = load_file(root / "models/reward" / WEIGHTS)
    assert len(kept) == 2 * 2 * 3 + 1
    assert float(kept["base_model.model.score.weight"].abs().max()) > 0
    assert base_of(root / "models/reward") == base_of(root / "models/sft")
    assert json.loads((root / "models/reward" / CONFIG).read_text())["lora_dropout"] == 0.2
    params_model = open_stage(root, "reward")[0].params.model
    loaded = load_reward_model(root / "models/reward", params_model, tokenizer()).eval()
    assert len(loaded.peft_config) == 1
    config = json.loads((root / "models/reward/config.json").read_text())
    assert loaded.config.score_std == config["score_std"] == metrics(root, "reward")["score_std"]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stopped_stage_with_adapters_ends_with_the_bits_of_the_undisturbed_one(
    on_a_base: Project, stage: str
) -> None:
    changes = {"lora": LORA | {"dropout": 0.1}, "max_steps": 6}
    straight, stopped = (on_a_base(stage, name, **{stage: changes}) for name in ("straight", "stopped"))
    work(straight, stage)
    begun = stop_after_a_step(stopped, stage)
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
