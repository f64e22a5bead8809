"""Each role has one adapter: where the SFT model is one, it is the reference, and policy and reward model begin as its
copies.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from config.errors import ModelError
from config.load import load, write
from costs.formulas.ppo_memory import resident_roles
from costs.planning.settings import settings
from costs.planning.target import find_target
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import files, open_stage, params, prompts, random_responses, stop_after_a_step, work
from training.distributed.shards import WEIGHTS
from training.modeling.adapters import AdapterView, adapter_parameters
from training.modeling.models import load_policy, load_reward_model
from training.modeling.sequences import sequence_logprobs
from training.modeling.tokenizer import load_tokenizer
from training.rl.layouts import load_roles
from training.rl.roles import Roles

LORA = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "down"], "dropout": 0.0}
LAYOUTS = ("separate", "shared_trunk", "shared_base")
PROMPTS = prompts(5)
RESPONSES = random_responses([1, 9, 4, 12, 6])
SEQUENCES = [[*prompt, *response] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
PROMPT_LENGTHS = [len(prompt) for prompt in PROMPTS]
IDS = torch.tensor([[5, 9, 14, 200]])
Project = Callable[..., Path]


def sections(base: Path, **changes: Any) -> dict[str, Any]:
    """A run on the base, with an adapter in every stage."""
    short = {"lora": LORA, "max_steps": 8, "epochs": 1.0}
    online = {"lora": LORA, "updates": 2, "learning_rate": 0.003}
    written: dict[str, Any] = {
        "model": {"path": str(base), "random": None},
        "sft": short,
        "reward": short,
        "ppo": online | {"layout": "shared_base"},
        "rloo": online,
        "grpo": online,
        "dpo": short,
    }
    for name, section in changes.items():
        written[name] = written.get(name, {}) | section
    return written


@pytest.fixture(scope="session")
def adapted(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished project's SFT model as a base, and an SFT and a reward model that are adapters on it. Read it; for
    more take `project`.
    """
    folder = tmp_path_factory.mktemp("one-adapter")
    shutil.copytree(finished / "models/sft", folder / "base")
    root = folder / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints", "models"))
    write(params(**sections(folder / "base")), root / "params.yaml")
    work(root, "sft")
    work(root, "reward")
    return root


@pytest.fixture
def project(adapted: Path, tmp_path: Path) -> Project:
    """Makes a copy in which data, sft and reward have run, with sections of its own."""

    def make(name: str = "project", **changes: Any) -> Path:
        root = tmp_path / name
        shutil.copytree(adapted, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
        write(params(**sections(adapted.parent / "base", **changes)), root / "params.yaml")
        return root

    return make


def roles_in(root: Path, method: str = "ppo") -> Roles:
    stage, _ = open_stage(root, method)
    return load_roles(stage, load_tokenizer(root / "data/tokenizer"))


def sft_logprobs(root: Path) -> Tensor:
    """Under the SFT model, loaded by itself."""
    model = params(**sections(root)).model
    sft = load_policy(root / "models/sft", model, load_tokenizer(root / "data/tokenizer")).eval()
    sft.requires_grad_(False)
    return torch.cat(sequence_logprobs(sft, SEQUENCES, PROMPT_LENGTHS, 1.0, 4096))


def stir(roles: Roles) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in roles.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def says(model: nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


# ---------------------------------------------------------------- policy and reference


@pytest.mark.parametrize(
    ("method", "layout"), [*(("ppo", layout) for layout in LAYOUTS), ("rloo", None), ("grpo", None)]
)
def test_the_policy_begins_as_the_sft_model_and_the_reference_stays_it(
    project: Project, method: str, layout: str | None
) -> None:
    changes = {"temperature": 1.0} | ({"layout": layout} if layout else {})
    root = project(**{method: changes}, align={"method": method})
    roles, expected = roles_in(root, method), sft_logprobs(root)
    assert torch.equal(torch.cat(roles.logprobs(SEQUENCES, PROMPT_LENGTHS, 4096)), expected)
    stir(roles)
    policy = torch.cat(roles.logprobs(SEQUENCES, PROMPT_LENGTHS, 4096))
    assert float((policy - expected).abs().max()) > 0.01
    assert torch.equal(torch.cat(roles.ref_logprobs(SEQUENCES, PROMPT_LENGTHS, 4096)), expected)


def test_the_policys_first_update_is_on_the_reference_and_changes_nothing_frozen(project: Project) -> None:
    root = project()
    before = {name: files(root / "models" / name) for name in ("sft", "reward")}
    work(root, "ppo")
    rows = [row.values for row in metric_rows(root, "ppo")]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert [row["first_ratio_error"] for row in rows] == pytest.approx([0, 0], abs=1e-4)
    assert abs(rows[1]["kl"]) > 1e-4
    assert before == {name: files(root / "models" / name) for name in ("sft", "reward")}


def test_the_sft_model_is_no_base_alone(adapted: Path) -> None:
    """What the tests of this file tell apart."""
    model = params(**sections(adapted)).model
    tokenizer = load_tokenizer(adapted / "data/tokenizer")
    base = load_policy(adapted.parent / "base", model, tokenizer)
    alone = torch.cat(sequence_logprobs(base.eval(), SEQUENCES, PROMPT_LENGTHS, 1.0, 4096))
    assert float((alone - sft_logprobs(adapted)).abs().max()) > 0.01


# ---------------------------------------------------------------- reward model, value model, DPO


def test_a_reward_model_that_learnt_nothing_has_the_adapter_of_the_sft_model(project: Project) -> None:
    root = project(reward={"learning_rate": 1e-12})
    work(root, "reward")
    sft, reward = (load_file(root / "models" / name / "adapter_model.safetensors") for name in ("sft", "reward"))
    assert reward.keys() - sft.keys() == {"base_model.model.score.weight"}
    for name, tensor in sft.items():
        torch.testing.assert_close(reward[name], tensor, atol=1e-6, rtol=0, msg=name)
    assert max(float(t.abs().max()) for name, t in sft.items() if "lora_B" in name) > 1e-3


@pytest.mark.parametrize("layout", ["separate", "shared_base"])
@pytest.mark.parametrize("value_init", ["reward", "sft"])
def test_the_value_model_begins_as_value_init_says_with_one_adapter(
    project: Project, layout: str, value_init: str
) -> None:
    root = project(ppo={"layout": layout, "value_init": value_init})
    view = roles_in(root).value_model
    assert isinstance(view, AdapterView)
    assert view.adapter is not None
    stored = load_file(root / "models" / value_init / "adapter_model.safetensors")
    adapter = adapter_parameters(view.model, view.adapter)
    assert len(adapter) == 12
    for name, parameter in adapter.items():
        kept = stored[f"base_model.model.{name.replace(f'.{view.adapter}.', '.')}"]
        assert torch.equal(parameter, kept), name


def test_dpo_learns_against_the_sft_model_and_saves_one_adapter_on_its_base(project: Project) -> None:
    """Dropout is running while it learns, and not in the reference."""
    root = project(dpo={"lora": LORA | {"dropout": 0.5}, "learning_rate": 1e-12})
    work(root, "dpo")
    result = metrics(root, "dpo")
    assert result["chosen_logps_change"] == pytest.approx(0, abs=1e-4)
    assert result["rejected_logps_change"] == pytest.approx(0, abs=1e-4)
    assert result["learning_parameters"] == metrics(root, "sft")["learning_parameters"]
    config = json.loads((root / "models/dpo/adapter_config.json").read_text())
    base = str(load(root / "params.yaml").model.path)
    assert config["base_model_name_or_path"] == base


# ---------------------------------------------------------------- what is saved


def by_peft(root: Path, method: str, base: Path) -> PreTrainedModel:
    """The model as somebody loads it who has nothing of this project."""
    model: PreTrainedModel = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), root / "models" / method
    ).eval()
    return model


@pytest.mark.parametrize("method", ["ppo", "grpo", "dpo"])
def test_what_a_stage_saves_is_loaded_by_peft_on_the_base_alone(project: Project, adapted: Path, method: str) -> None:
    root = project(align={"method": method})
    work(root, method)
    base = adapted.parent / "base"
    config = json.loads((root / "models" / method / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    ours = load_policy(
        root / "models" / method, params(**sections(base)).model, load_tokenizer(root / "data/tokenizer")
    ).eval()
    plain = says(by_peft(root, method, base))
    torch.testing.assert_close(plain, says(ours), atol=1e-5, rtol=0)
    assert float((plain - says(by_peft(root, "sft", base))).abs().max()) > 1e-3


def test_a_reward_model_scores_the_same_when_its_adapter_is_read_alone(project: Project, adapted: Path) -> None:
    root = project()
    roles = roles_in(root)
    alone = load_reward_model(
        root / "models/reward", params(**sections(root)).model, load_tokenizer(root / "data/tokenizer")
    ).eval()
    alone.requires_grad_(False)
    with torch.no_grad():
        expected = alone.base_model(input_ids=IDS).last_hidden_state
        assert torch.equal(roles.reward_model.base_model(input_ids=IDS).last_hidden_state, expected)


@pytest.mark.parametrize("layout", ["separate", "shared_base"])
def test_a_stopped_run_ends_with_the_bits_of_the_undisturbed_one(project: Project, layout: str) -> None:
    straight, stopped = (project(name, ppo={"layout": layout}) for name in ("straight", "stopped"))
    work(straight, "ppo")
    stage = stop_after_a_step(stopped, "ppo")
    latest = stage.checkpoints.latest()
    assert latest is not None
    shares = [load_file(path) for path in (latest.path / WEIGHTS).glob("*.safetensors")]
    # two adapters, and the head's weight and bias: nothing of the reference
    assert len({name for share in shares for name in share}) == 26
    work(stopped, "ppo")
    assert files(stopped / "models/ppo") == files(straight / "models/ppo")
    assert metrics(stopped, "ppo") == metrics(straight, "ppo")


# ---------------------------------------------------------------- memory


def held_bytes(roles: Roles) -> int:
    """Of the weights of all roles, their heads excepted."""
    result: dict[int, int] = {}
    for role in (roles.policy, roles.ref_policy, roles.reward_model, roles.value_model):
        model = role.model if isinstance(role, AdapterView) else role
        for name, p in model.named_parameters() if model is not None else ():
            if not name.startswith("score."):
                result[p.untyped_storage().data_ptr()] = p.untyped_storage().nbytes()
    return sum(result.values())


@pytest.mark.parametrize("sft_lora", [LORA, None], ids=["sft-adapter", "sft-whole"])
@pytest.mark.parametrize("value_init", ["reward", "sft"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_the_weights_that_are_held(
    project: Project, layout: str, value_init: str, sft_lora: dict[str, Any] | None
) -> None:
    root = project(sft={"lora": sft_lora}, ppo={"layout": layout, "value_init": value_init})
    if sft_lora is None:  # the same base, without the adapter on it
        base = Path(str(load(root / "params.yaml").model.path))
        shutil.rmtree(root / "models/sft")
        shutil.copytree(base, root / "models/sft")
        for path in (root / "models/reward/adapter_config.json",):
            path.write_text(path.read_text().replace(str(base), "../sft"))
    chosen = load(root / "params.yaml")
    setting = settings(chosen, find_target(chosen, None, 1, None, root))["ppo"]
    planned = resident_roles(setting)
    assert ("ref" in planned) is (sft_lora is not None)
    heads = 4 * 32 * (2 if layout == "separate" else 1) if layout != "shared_base" else 0
    weights = sum(parts["weights"] for parts in planned.values())
    assert held_bytes(roles_in(root)) == pytest.approx(weights - heads, abs=300)


# ---------------------------------------------------------------- what does not fit


def test_a_folder_of_other_ranks_than_params_say_is_refused_in_one_line(project: Project) -> None:
    """Params that were changed without running the SFT stage again."""
    other = LORA | {"rank": 2}
    root = project(sft={"lora": other}, reward={"lora": other}, ppo={"lora": other})
    with pytest.raises(ModelError, match=r"ppo\.lora\.rank is 2, and .*models/sft has 4") as error:
        roles_in(root)
    assert "\n" not in str(error.value)
