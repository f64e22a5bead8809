import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from config import jsonl
from config.errors import ModelError, TrainingDiverged
from config.load import write
from config.methods.ppo import Ppo
from config.records import UsageRow
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics
from tests.training.support.tiny import (
    files,
    names,
    open_stage,
    params,
    prompts,
    random_responses,
    stop_after_a_step,
    work,
)
from training.distributed import shards
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.rl.episodes import choose_prompts, mini_batches, pad_responses
from training.rl.layouts import load_roles
from training.rl.ppo_math import policy_loss, value_loss
from training.rl.roles import Roles

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]
LAYOUTS = ("separate", "shared_trunk")


def settings(**changes: object) -> Ppo:
    return params(ppo=changes).ppo


def roles_in(root: Path) -> Roles:
    stage, _ = open_stage(root, "ppo")
    return load_roles(stage, load_tokenizer(root / "data/tokenizer"))


def first_update(root: Path) -> dict[str, float]:
    return metric_rows(root, "ppo")[0].values


# ---------------------------------------------------------------- order


def test_every_prompt_is_drawn_once_a_pass_and_repeated_for_its_responses() -> None:
    pool = [[i] for i in range(12)]
    chosen = settings(batch_size=8, responses_per_prompt=2, num_mini_batches=1)
    batches = [choose_prompts(pool, chosen, seed=3, update=update) for update in (1, 2, 3)]
    assert all(len(batch) == 8 and batch[0::2] == batch[1::2] for batch in batches)
    sampled = [prompt for batch in batches for prompt in batch[::2]]
    assert sorted(sampled) == pool
    assert sampled != pool
    assert choose_prompts(pool, chosen, seed=3, update=2) == batches[1]
    assert choose_prompts(pool, chosen, seed=3, update=4) != batches[0]
    assert choose_prompts(pool, chosen, seed=4, update=1) != batches[0]


def test_every_episode_is_in_one_mini_batch_of_each_epoch() -> None:
    chosen = settings(num_mini_batches=4, ppo_epochs=3)
    steps = mini_batches(16, chosen, seed=1, update=5)
    assert [len(step) for step in steps] == [4] * 12
    epochs = [[i for step in steps[k : k + 4] for i in step] for k in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 3
    assert epochs[0] != epochs[1]
    assert mini_batches(16, chosen, seed=1, update=5) == steps
    assert mini_batches(16, chosen, seed=1, update=6) != steps


def test_responses_are_padded_on_the_right() -> None:
    padded_BT, mask_BT = pad_responses([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert padded_BT.tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert mask_BT.tolist() == [[True, True], [True, False]]


def test_prompts_without_room_for_a_response_are_left_out(project: Project) -> None:
    stage, _ = open_stage(project("ppo", ppo={"max_new_tokens": 70}), "ppo")
    fitting = read_prompts(stage)
    everything = len((stage.root / "data/prepared/prompts/train.jsonl").read_text().splitlines())
    assert 0 < len(fitting) < everything
    assert max(map(len, fitting)) <= 96 - 70


# ---------------------------------------------------------------- roles

PROMPTS = prompts(6)
RESPONSE_LENGTHS = [1, 9, 4, 12, 2, 6]
SEQUENCES = [
    [*prompt, *response] for prompt, response in zip(PROMPTS, random_responses(RESPONSE_LENGTHS), strict=True)
]
PROMPT_LENGTHS = [len(prompt) for prompt in PROMPTS]


def gradients(roles: Roles, batches: list[list[int]], chosen: Ppo) -> dict[str, Tensor]:
    """Of the whole PPO loss on the sequences, added up over batches of them."""
    old = torch.linspace(-3, -1, sum(RESPONSE_LENGTHS)).split(RESPONSE_LENGTHS)
    for batch in batches:
        new = roles.forward([SEQUENCES[i] for i in batch], [PROMPT_LENGTHS[i] for i in batch])
        old_N = torch.cat([old[i] for i in batch])
        losses_N = (
            policy_loss(new.logprobs, old_N - 3, torch.sin(old_N * 9), 0.2).losses
            + 0.1 * value_loss(new.values, old_N, old_N * 2, 0.2).losses
        )
        losses_N.sum().backward()
    result = {name: p.grad.clone() for name, p in roles.trainable().items() if p.grad is not None}
    for parameter in roles.trainable().values():
        parameter.grad = None
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_inert_in_logprobs_values_and_gradients(finished: Path, project: Project, layout: str) -> None:
    chosen = settings(layout=layout)
    roles = roles_in(project("ppo", ppo={"layout": layout}))
    together = roles.forward(SEQUENCES, PROMPT_LENGTHS)
    alone = [roles.forward([ids], [n]) for ids, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
    for place in range(3):
        torch.testing.assert_close(
            together[place], torch.cat([alone_part[place] for alone_part in alone]), atol=1e-5, rtol=0
        )
    whole = gradients(roles, [list(range(6))], chosen)
    apart = gradients(roles, [[i] for i in (5, 3, 1, 0, 2, 4)], chosen)
    assert whole.keys() == apart.keys()
    assert len(whole) > 20
    for name, gradient in whole.items():
        torch.testing.assert_close(apart[name], gradient, atol=1e-4, rtol=1e-3, msg=name)


def test_old_values_and_reference_logprobs_are_those_of_the_forward(project: Project) -> None:
    roles = roles_in(project("ppo"))
    with torch.no_grad():
        new = roles.forward(SEQUENCES, PROMPT_LENGTHS)
    torch.testing.assert_close(torch.cat(roles.values(SEQUENCES, PROMPT_LENGTHS, 4096)), new.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        torch.cat(roles.ref_logprobs(SEQUENCES, PROMPT_LENGTHS, 4096)), new.logprobs, atol=1e-5, rtol=0
    )


def test_a_fresh_value_head_has_small_weights_and_one_from_the_reward_model_its_weights(project: Project) -> None:
    head = roles_in(project("ppo", "trunk", ppo={"layout": "shared_trunk"})).trunk_value_head
    assert head is not None
    assert head.bias is None
    # of 32 numbers
    assert float(head.weight.detach().std()) == pytest.approx(1 / math.sqrt(33), rel=0.35)
    from_sft = roles_in(project("ppo", "sft-value", ppo={"value_init": "sft"})).value_model
    from_reward = roles_in(project("ppo", "reward-value")).value_model
    assert from_sft is not None
    assert from_reward is not None
    assert torch.equal(from_sft.score.weight, head.weight)
    reward = project("ppo", "saved") / "models/reward"
    config, saved = (json.loads((reward / "config.json").read_text()), load_file(reward / "model.safetensors"))
    assert torch.equal(from_reward.score.weight, saved["score.weight"] / config["score_std"])
    assert from_reward.score.bias.item() == pytest.approx(-config["score_mean"] / config["score_std"])


def test_a_step_that_is_no_number_is_not_taken(project: Project) -> None:
    roles = roles_in(project("ppo"))
    before = {name: p.detach().clone() for name, p in roles.trainable().items()}
    for parameter in roles.trainable().values():
        parameter.grad = torch.ones_like(parameter)
    roles.trainable()["value.score.weight"].grad[0, 0] = math.nan
    assert not math.isfinite(roles.step(1.0))
    assert all(torch.equal(before[name], p) for name, p in roles.trainable().items())


# ---------------------------------------------------------------- trajectories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_size_of_micro_batches_and_rollout_batches_does_not_change_the_trajectory(
    project: Project, layout: str
) -> None:
    weights, rows = [], []
    for name, sizes in {"whole": (4096, 16), "small": (120, 3)}.items():
        root = project(
            "ppo",
            name,
            seed=2,  # with seed 1 a draw falls between two roundings, and samples another token
            ppo={"layout": layout, "updates": 3, "micro_batch_tokens": sizes[0], "rollout_batch_size": sizes[1]},
        )
        work(root, "ppo")
        weights.append(load_file(root / "models/ppo/model.safetensors"))
        rows.append([row.values for row in metric_rows(root, "ppo")])
    for whole, small in zip(*rows, strict=True):
        shared = {name: value for name, value in whole.items() if name not in ("seconds", "first_ratio_error")}
        assert {name: small[name] for name in shared} == pytest.approx(shared, abs=1e-3, rel=1e-3)
    before = load_file(root / "models/sft/model.safetensors")
    assert any(float((weights[0][name] - before[name]).abs().max()) > 3e-4 for name in before)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=5e-5, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_ratio_of_the_first_mini_batch_is_one(project: Project, layout: str, temperature: float) -> None:
    root = project("ppo", ppo={"layout": layout, "updates": 2, "temperature": temperature})
    work(root, "ppo")
    assert [row.values["first_ratio_error"] for row in metric_rows(root, "ppo")] == pytest.approx([0, 0], abs=1e-4)
    assert first_update(root)["kl"] == pytest.approx(0, abs=1e-4)


def test_an_update_stops_early_where_the_policies_part(project: Project) -> None:
    tokens = []
    for name, target_kl in {"stopped": 1.0e-6, "whole": None}.items():
        root = project("ppo", name, ppo={"updates": 1, "ppo_epochs": 4, "learning_rate": 0.01, "target_kl": target_kl})
        work(root, "ppo")
        rows = jsonl.read(root / "runs/ppo/usage.jsonl", UsageRow).rows
        tokens.append(sum(row.tokens for row in rows if row.phase == "update"))
    # the two mini-batches of the first epoch: the second is where the KL is seen
    assert tokens[0] * 4 == tokens[1]


def test_training_ends_where_the_policy_leaves_the_sft_model_too_far(project: Project) -> None:
    root = project("ppo", ppo={"max_kl": 0.001, "learning_rate": 0.01})
    work(root, "ppo")
    rows = metric_rows(root, "ppo")
    assert metrics(root, "ppo")["updates"] == len(rows) < 8
    assert [row.values["kl"] > 0.001 for row in rows] == [False] * (len(rows) - 1) + [True]
    assert (root / "models/ppo/model.safetensors").exists()


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_outputs(project: Project) -> None:
    root = project("ppo", ppo={"max_kl": 0.001, "learning_rate": 0.01, "checkpoint_every_updates": 1})
    stage, run = open_stage(root, "ppo")
    stage.checkpoints.clear = lambda: None  # type: ignore[method-assign] # what a kill just before it leaves
    run(stage)
    straight, rows = ((files(root / "models/ppo"), metrics(root, "ppo")), len(metric_rows(root, "ppo")))
    work(root, "ppo")
    assert len(metric_rows(root, "ppo")) == rows < 8
    assert (files(root / "models/ppo"), metrics(root, "ppo")) == straight


def test_the_normalisation_stored_with_the_reward_model_is_applied_to_the_scores_of_ppo(project: Project) -> None:
    scores = []
    for name, shift in {"as-stored": 0.0, "shifted": 3.0}.items():
        root = project("ppo", name, ppo={"updates": 1})
        path = root / "models/reward/config.json"
        config = json.loads(path.read_text())
        assert config["score_std"] != 1.0
        path.write_text(json.dumps(config | {"score_mean": config["score_mean"] + shift * config["score_std"]}))
        work(root, "ppo")
        scores.append(first_update(root)["score"])
    assert scores[0] - scores[1] == pytest.approx(3.0, abs=1e-4)


def test_a_missing_end_of_sequence_costs_its_penalty(project: Project) -> None:
    returns = []
    for penalty in (0.0, 3.0):
        root = project("ppo", f"penalty-{penalty}", ppo={"updates": 1, "missing_eos_penalty": penalty, "lam": 1.0})
        work(root, "ppo")
        returns.append(first_update(root))
    assert returns[0]["eos_rate"] < 0.5
    assert returns[0]["score"] == returns[1]["score"]
    assert returns[0]["return"] - returns[1]["return"] > 1.0


def test_scores_are_clipped_before_they_become_rewards(project: Project) -> None:
    root = project("ppo", ppo={"updates": 1, "score_clip": 0.001, "missing_eos_penalty": 0.0, "lam": 1.0})
    work(root, "ppo")
    assert abs(first_update(root)["score"]) > 0.001
    assert abs(first_update(root)["return"]) <= 0.001 + 1e-6


def test_the_adaptive_coefficient_moves_and_the_fixed_one_does_not(finished: Path, project: Project) -> None:
    coefficients = [row.values["kl_coef"] for row in metric_rows(finished, "ppo")]
    assert coefficients[0] == 0.05
    assert len(set(coefficients)) == 8
    kl = params().ppo.kl.model_dump() | {"controller": "fixed"}
    root = project("ppo", ppo={"updates": 3, "kl": kl})
    work(root, "ppo")
    assert [row.values["kl_coef"] for row in metric_rows(root, "ppo")] == [0.05] * 3


# ---------------------------------------------------------------- divergence


def zero_the_head(root: Path) -> None:
    weights = load_file(root / "models/reward/model.safetensors")
    save_file(
        {**weights, "score.weight": 0 * weights["score.weight"]},
        root / "models/reward/model.safetensors",
        metadata={"format": "pt"},
    )


def break_the_head(root: Path) -> None:
    weights = load_file(root / "models/reward/model.safetensors")
    broken = {**weights, "score.weight": weights["score.weight"] * math.nan}
    save_file(broken, root / "models/reward/model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("break_it", "said"), [(zero_the_head, "cannot tell them apart"), (break_the_head, "ppo score is nan")]
)
def test_a_reward_model_that_cannot_teach_is_named_and_the_state_kept(
    project: Project, break_it: Callable[[Path], None], said: str
) -> None:
    root = project("ppo")
    break_it(root)
    stage, run = open_stage(root, "ppo")
    with pytest.raises(TrainingDiverged, match=said):
        run(stage)
    assert names(stage.checkpoints.folder) == ["step-00000000"]
    assert not (root / "models/ppo").exists()


def test_a_reckless_learning_rate_is_named(project: Project) -> None:
    reckless = {
        "learning_rate": 1.0,
        "ppo_epochs": 4,
        "cliprange": 0.9,
        "schedule": "constant",
        "checkpoint_every_updates": 1,
    }
    root = project("ppo", ppo=reckless)
    stage, run = open_stage(root, "ppo")
    with pytest.raises(TrainingDiverged, match=r"in update \d") as said:
        run(stage)
    assert not (root / "models/ppo").exists()
    broke_at = int(str(said.value).split("in update ")[1][0])
    result = stage.checkpoints.latest()
    assert (result.step if result else 0) == broke_at - 1, "the state before the update that went wrong is kept"


def test_a_policy_and_a_reward_model_of_two_vocabularies_do_not_meet(project: Project) -> None:
    root = project("ppo")
    stage, run = open_stage(root, "ppo")
    tokenizer = load_tokenizer(root / "data/tokenizer")
    model = load_roles(stage, tokenizer).reward_model
    model.resize_token_embeddings(len(tokenizer) - 20)
    model.save_pretrained(root / "models/reward")
    with pytest.raises(ModelError, match="models/reward has a vocabulary of"):
        run(stage)


# ---------------------------------------------------------------- resume


@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, finished: Path
) -> None:
    root = project("ppo")
    killed_stopped_and_resumed(root, "ppo", kill_at=4, stop_at=5)
    assert files(root / "models/ppo") == files(finished / "models/ppo")
    assert metrics(root, "ppo") == metrics(finished, "ppo")
    assert not list((root / "checkpoints/ppo").glob("*/step-*"))


def stopped_after_one_more_update(root: Path) -> None:
    stage = stop_after_a_step(root, "ppo")
    assert len(names(stage.checkpoints.folder)) <= 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_stopped_after_every_update_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, layout: str
) -> None:
    changes = {"layout": layout, "updates": 4}
    straight, stopped = (project("ppo", name, ppo=changes) for name in ("straight", "stopped"))
    work(straight, "ppo")
    for _ in range(3):
        stopped_after_one_more_update(stopped)
    work(stopped, "ppo")
    assert files(stopped / "models/ppo") == files(straight / "models/ppo")
    assert metrics(stopped, "ppo") == metrics(straight, "ppo")


def test_a_damaged_checkpoint_falls_back_and_still_ends_with_the_same_bits(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    straight, stopped = (project("ppo", name, ppo={"updates": 4}) for name in ("straight", "stopped"))
    work(straight, "ppo")
    for _ in range(3):
        stopped_after_one_more_update(stopped)
    newest = max((stopped / "checkpoints/ppo").glob("*/step-*"))
    [optimizer] = (newest / shards.OPTIMIZER).glob("*.safetensors")
    content = bytearray(optimizer.read_bytes())
    content[len(content) // 2] ^= 255
    optimizer.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        work(stopped, "ppo")
    assert any(f"{optimizer.name} is not what was written" in record.getMessage() for record in caplog.records)
    assert files(stopped / "models/ppo") == files(straight / "models/ppo")


def test_a_checkpoint_of_other_settings_is_not_picked_up(project: Project) -> None:
    root = project("ppo", ppo={"updates": 2})
    stopped_after_one_more_update(root)
    write(params(ppo={"updates": 2, "learning_rate": 2.0e-4}), root / "params.yaml")
    work(root, "ppo")
    assert [(row.attempt, row.step) for row in metric_rows(root, "ppo")] == [(1, 1), (2, 1), (2, 2)]
