import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from config.errors import ModelError
from config.load import write
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import files, open_stage, params, prompts, random_responses, stop_after_a_step, work
from training.distributed.shards import WEIGHTS
from training.modeling.adapters import AdapterView, activate, lora_layers
from training.modeling.models import load_policy, load_reward_model
from training.modeling.scoring import score
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
Project = Callable[..., Path]


def sections(changes: dict[str, Any]) -> dict[str, Any]:
    model = changes.pop("model", {})
    ppo = {"layout": "shared_base", "lora": LORA, "updates": 2, "learning_rate": 0.003, **changes}
    return {"reward": {"lora": LORA}, "ppo": ppo, "model": model}


@pytest.fixture(scope="session")
def adapted(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished project with a reward model that is an adapter on models/sft. Read it; for more take
    `lora_project`.
    """
    root = tmp_path_factory.mktemp("adapted") / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints", "ppo", "evaluate.json"))
    write(params(**sections({})), root / "params.yaml")
    work(root, "reward")
    return root


@pytest.fixture
def lora_project(adapted: Path, tmp_path: Path) -> Project:
    """Makes a copy in which data, sft and reward (an adapter) have run, with a ppo section of its own."""

    def make(name: str = "project", **changes: Any) -> Path:
        root = tmp_path / name
        shutil.copytree(adapted, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
        write(params(**sections(changes)), root / "params.yaml")
        return root

    return make


def roles_in(root: Path) -> Roles:
    stage, _ = open_stage(root, "ppo")
    return load_roles(stage, load_tokenizer(root / "data/tokenizer"))


def stirred(roles: Roles) -> Roles:
    """The same roles with adapters and heads that say something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in roles.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return roles


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes of every storage that the model's weights lie in."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


# ---------------------------------------------------------------- what the roles are


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_adapters_and_heads_learn(lora_project: Project, layout: str) -> None:
    roles = roles_in(lora_project(layout=layout))
    names = set(roles.trainable())
    heads = {"value.weight"} if layout == "shared_trunk" else {"value.score.weight", "value.score.bias"}
    assert {name for name in names if ".lora_A." not in name and ".lora_B." not in name} == heads
    # A and B, layers, modules
    assert sum(name.startswith("policy.") for name in names) == 2 * 2 * 3
    for role in (roles.policy, roles.ref_policy, roles.reward_model, roles.value_model):
        model = role.model if isinstance(role, AdapterView) else role
        learning = {id(p) for p in model.parameters() if p.requires_grad} if model is not None else set()
        assert learning <= {id(p) for p in roles.trainable().values()}
    assert all(p.dtype == torch.float32 for p in roles.trainable().values())


def test_the_shared_base_is_in_memory_once(lora_project: Project, adapted: Path) -> None:
    roles = roles_in(lora_project())
    views = [roles.policy, roles.ref_policy, roles.reward_model, roles.value_model]
    assert len({id(view.model) for view in views if isinstance(view, AdapterView)}) == 1
    held = sum(storages(roles.policy.model).values())
    base = sum(tensor.nbytes for tensor in load_file(adapted / "models/sft/model.safetensors").values())
    adapter = sum(
        t.nbytes
        for name, t in load_file(adapted / "models/reward/adapter_model.safetensors").items()
        if "score" not in name
    )
    assert held == base + 3 * adapter
    separate = roles_in(lora_project("separate", layout="separate", lora=None))
    assert (
        sum(sum(storages(m).values()) for m in (separate.policy, separate.ref_policy, separate.reward_model))
        > 3 * base
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_sft_model_whatever_the_adapters_learnt(lora_project: Project, layout: str) -> None:
    root = lora_project(layout=layout)
    chosen = params(**sections({"layout": layout})).ppo
    roles = stirred(roles_in(root))
    sft = load_policy(root / "models/sft", params().model, load_tokenizer(root / "data/tokenizer")).eval()
    expected = torch.cat(sequence_logprobs(sft, SEQUENCES, PROMPT_LENGTHS, chosen.temperature, 4096))
    with torch.no_grad():
        # leaves the policy's adapter on
        policy = roles.forward(SEQUENCES, PROMPT_LENGTHS).logprobs
    assert torch.equal(torch.cat(roles.ref_logprobs(SEQUENCES, PROMPT_LENGTHS, 4096)), expected)
    assert float((policy - expected).abs().max()) > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_reward_models_folder(lora_project: Project, layout: str) -> None:
    root = lora_project(layout=layout)
    roles = stirred(roles_in(root))
    alone = load_reward_model(root / "models/reward", params().model, load_tokenizer(root / "data/tokenizer")).eval()
    expected = score(alone, SEQUENCES, 4096)
    assert float(expected.std()) > 0
    # without vector units the sums of both sides are rounded in another order: 6e-6 apart
    torch.testing.assert_close(score(roles.reward_model, SEQUENCES, 4096), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value_init", ["reward", "sft"])
@pytest.mark.parametrize(("layout", "lora"), [("separate", False), ("separate", True), ("shared_base", True)])
def test_the_value_model_starts_on_the_scale_of_the_rewards(
    lora_project: Project, layout: str, lora: bool, value_init: str
) -> None:
    """The reward model's normalised score, which the returns are made of, wherever a response might end: or a fresh
    head.
    """
    root = lora_project(layout=layout, value_init=value_init, lora=LORA if lora else None)
    other_normalisation(root)
    roles = roles_in(root)
    last = [roles.values([ids], [len(ids) - 1], 4096)[0] for ids in SEQUENCES]
    assert roles.value_model is not None
    before_last = score(roles.reward_model, [ids[:-1] for ids in SEQUENCES], 4096)
    gap = float((torch.cat(last) - before_last).abs().max())
    assert (gap < 1e-5) is (value_init == "reward")
    if value_init == "sft":
        assert float(roles.value_model.score.weight.detach().std()) == pytest.approx(1 / math.sqrt(33), rel=0.35)


def other_normalisation(root: Path) -> None:
    """Let the reward model's scores have a mean and a deviation that nobody takes for 0 and 1."""
    path = root / "models/reward/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"score_mean": 3.0, "score_std": 0.25}))


# ---------------------------------------------------------------- forwards


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_inert_with_adapters(lora_project: Project, layout: str) -> None:
    roles = stirred(roles_in(lora_project(layout=layout)))
    together = roles.forward(SEQUENCES, PROMPT_LENGTHS)
    alone = [roles.forward([ids], [n]) for ids, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
    for place in range(3):
        torch.testing.assert_close(
            together[place], torch.cat([alone_part[place] for alone_part in alone]), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_activations_give_the_same_gradients_under_the_right_adapters(
    lora_project: Project, layout: str
) -> None:
    result = []
    for recompute in (False, True):
        root = lora_project(str(recompute), layout=layout, activation_checkpointing=recompute)
        roles = stirred(roles_in(root))
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            new = roles.forward(SEQUENCES, PROMPT_LENGTHS)
        # another role that is used in between must not matter
        activate(lora_layers(roles.policy.model), None)
        (new.logprobs.sum() + (new.values**2).sum()).backward()
        result.append(({name: p.grad for name, p in roles.trainable().items()}, sum(saved)))
    (kept, kept_size), (recomputed, recomputed_size) = result
    assert recomputed_size < 0.5 * kept_size
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)
    assert sum(float(gradient.abs().sum()) > 0 for gradient in kept.values()) == len(kept)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_changes_adapters_and_heads_alone_and_begins_with_a_ratio_of_one(
    lora_project: Project, layout: str
) -> None:
    root = lora_project(layout=layout)
    before = {name: files(root / "models" / name) for name in ("sft", "reward")}
    work(root, "ppo")
    rows = [row.values for row in metric_rows(root, "ppo")]
    assert [row["first_ratio_error"] for row in rows] == pytest.approx([0, 0], abs=1e-4)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(rows[1]["kl"]) > 1e-4
    assert before == {name: files(root / "models" / name) for name in ("sft", "reward")}
    saved = load_file(root / "models/ppo/adapter_model.safetensors")
    assert len(saved) == 12
    assert any(float(tensor.abs().max()) > 0 for name, tensor in saved.items() if "lora_B" in name)
    config = json.loads((root / "models/ppo/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["peft_type"]) == ("../sft", 4, "LORA")


def test_the_saved_policy_says_what_the_policy_in_memory_said(lora_project: Project, tmp_path: Path) -> None:
    root = lora_project()
    stage, run = open_stage(root, "ppo")
    kept: list[Roles] = []
    module = __import__("training.ppo", fromlist=["load_roles"])
    load = module.load_roles
    try:
        module.load_roles = lambda *given: (kept.append(load(*given)), kept[0])[1]
        run(stage)
    finally:
        module.load_roles = load
    chosen = stage.params.ppo
    with torch.no_grad():
        expected = kept[0].forward(SEQUENCES, PROMPT_LENGTHS).logprobs
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(root, moved)
    shutil.rmtree(root)
    loaded = load_policy(moved / "models/ppo", stage.params.model, load_tokenizer(moved / "data/tokenizer")).eval()
    result = torch.cat(sequence_logprobs(loaded, SEQUENCES, PROMPT_LENGTHS, chosen.temperature, 4096))
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_the_size_of_micro_batches_does_not_change_the_trajectory_under_the_shared_base(lora_project: Project) -> None:
    weights = []
    for name, sizes in {"whole": (4096, 16), "small": (120, 3)}.items():
        root = lora_project(name, micro_batch_tokens=sizes[0], rollout_batch_size=sizes[1])
        work(root, "ppo")
        weights.append(load_file(root / "models/ppo/adapter_model.safetensors"))
    assert max(float(weight.abs().max()) for name, weight in weights[0].items() if "lora_B" in name) > 3e-3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_stopped_run_on_the_shared_base_ends_with_the_bits_of_the_undisturbed_one(
    lora_project: Project, optimizer: str
) -> None:
    straight, stopped = (lora_project(name, updates=3, optimizer=optimizer) for name in ("straight", "stopped"))
    work(straight, "ppo")
    for _ in range(2):
        stage = stop_after_a_step(stopped, "ppo")
        latest = stage.checkpoints.latest()
        assert latest is not None
        shares = [load_file(path) for path in (latest.path / WEIGHTS).glob("*.safetensors")]
        saved = {name for share in shares for name in share}
        assert len(saved) == 26  # two adapters, and the head's weight and bias: nothing frozen
    work(stopped, "ppo")
    assert files(stopped / "models/ppo") == files(straight / "models/ppo")
    assert metrics(stopped, "ppo") == metrics(straight, "ppo")


# ---------------------------------------------------------------- bad input


def test_a_shared_base_needs_a_reward_model_that_is_an_adapter(lora_project: Project, finished: Path) -> None:
    root = lora_project()
    shutil.rmtree(root / "models/reward")
    shutil.copytree(finished / "models/reward", root / "models/reward")
    with pytest.raises(ModelError, match="has weights of its own") as error:
        roles_in(root)
    assert "\n" not in str(error.value)


def test_a_shared_base_needs_the_reward_models_base_to_be_its_own(lora_project: Project) -> None:
    root = lora_project()
    shutil.copytree(root / "models/sft", root / "models/other")
    config = root / "models/reward/adapter_config.json"
    config.write_text(config.read_text().replace("../sft", "../other"))
    with pytest.raises(ModelError, match=r"has the base .*models/other"):
        roles_in(root)


def test_matrices_that_the_model_does_not_have_are_named_with_those_it_has(lora_project: Project) -> None:
    root = lora_project(lora={**LORA, "modules": ["q", "c_attn"]})
    with pytest.raises(
        ModelError, match=r"ppo\.lora\.modules: 'c_attn' is not a matrix .* It has q, k, v, o, gate, up, down;"
    ) as error:
        roles_in(root)
    assert "self_attn.q_proj" in str(error.value)
    assert "\n" not in str(error.value)
