"""RLOO and GRPO: the loop of PPO without a critic. The estimators themselves: test_advantages.py."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from config import jsonl
from config.errors import DataError, ParamsError, TrainingDiverged
from config.load import write
from config.methods.registry import SAMPLING_METHODS
from config.records import UsageRow
from tests.training.distributed.test_collectives import largest_difference
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics
from tests.training.support.tiny import files, names, open_stage, params, stop_after_a_step, work
from training import ppo as loop
from training.modeling.tokenizer import load_tokenizer
from training.rl import layouts
from training.rl.layouts import load_roles

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]
METHODS = ("rloo", "grpo")
OF_A_CRITIC = {"value", "return", "explained_variance", "value_loss", "value_clip_fraction"}


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(
    request: pytest.FixtureRequest, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A method, and a project in which it ran to its end."""
    root = tmp_path_factory.mktemp(request.param) / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    write(params(), root / "params.yaml")
    work(root, request.param)
    return request.param, root


def usage(root: Path, method: str) -> list[UsageRow]:
    return jsonl.read(root / f"runs/{method}/usage.jsonl", UsageRow).rows


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("method", METHODS)
def test_training_raises_the_score_and_starts_at_the_reference(project: Project, method: str) -> None:
    """Responses of three tokens, so that a model that says anything soon finds what the reward model likes. The gains
    are 1.1 (RLOO) and 0.7 (GRPO) with the seed of the tiny recipe, and less than half of that is asked for; another
    seed may gain less.
    """
    changes = {
        "updates": 30,
        "learning_rate": 3.0e-3,
        "kl": params().rloo.kl.model_dump() | {"coef": 0.01},
        "max_new_tokens": 3,
        "batch_size": 96,
        "responses_per_prompt": 8,
        "rollout_batch_size": 96,
        "missing_eos_penalty": 0.0,
        "checkpoint_every_updates": 100,
    }
    root = project(method, **{method: changes})
    work(root, method)
    rows = [row.values for row in metric_rows(root, method)]
    assert len(rows) == 30
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-3)
    assert sum(row["score"] for row in rows[-3:]) / 3 > rows[0]["score"] + 0.3
    assert rows[-1]["kl"] > 0.1
    result = metrics(root, method)
    assert (result["updates"], result["episodes"]) == (30, 30 * 96)
    assert result["score"] == pytest.approx(sum(row["score"] for row in rows[-5:]) / 5)


def test_there_is_no_value_phase_and_every_token_is_accounted_in_the_others(undisturbed: tuple[str, Path]) -> None:
    method, root = undisturbed
    rows = usage(root, method)
    for step in range(1, 9):
        spent = {
            row.phase: row.tokens for row in rows if row.step == step and row.phase not in ("save", "start", "other")
        }
        assert set(spent) == {"rollout", "logprobs", "score", "reference", "advantage", "update"}
        assert spent["score"] == spent["reference"] == spent["rollout"]
        assert spent["update"] == 2 * spent["rollout"]


def test_nothing_is_told_of_values_that_nobody_has(undisturbed: tuple[str, Path]) -> None:
    method, root = undisturbed
    rows = [row.values for row in metric_rows(root, method)]
    assert len(rows) == 8
    assert all(not OF_A_CRITIC & row.keys() and 0 <= row["equal_groups"] <= 1 for row in rows)
    assert not OF_A_CRITIC & metrics(root, method).keys()
    assert {
        "score",
        "kl",
        "entropy",
        "length",
        "eos_rate",
        "policy_loss",
        "clip_fraction",
        "grad_norm",
        "learning_rate",
    } < metrics(root, method).keys()
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * (1 - update / 8) for update in range(8)])


@pytest.mark.parametrize("method", METHODS)
def test_an_update_learns_from_the_methods_own_advantages(
    project: Project, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards: list[Tensor] = []
    scores: list[Tensor] = []
    episodes: list[Any] = []
    result, batch = loop.token_rewards, loop.Episodes

    def kept(kl_BT: Tensor, score_B: Tensor, mask_BT: Tensor, kl_coef: float) -> Tensor:
        scores.append(score_B)
        rewards.append(result(kl_BT, score_B, mask_BT, kl_coef))
        return rewards[-1]

    monkeypatch.setattr(loop, "token_rewards", kept)
    monkeypatch.setattr(loop, "Episodes", lambda *columns: episodes.append(batch(*columns)) or episodes[-1])
    changes = {
        "updates": 1,
        "responses_per_prompt": 4,
        **({"normalise_advantages": False} if method == "rloo" else {}),
    }
    work(project(method, **{method: changes}), method)
    whole = episodes[0]
    for group, score in zip(rewards[0].sum(dim=1).split(4), scores[0].split(4), strict=True):
        others, penalty = (group.sum() - group) / 3, score - group
        expected = (
            group - others
            if method == "rloo"
            else (score - score.mean()) / (score.std() + 1e-4) - (penalty - penalty.mean())
        )
        mask, advantages = whole.mask[:4], whole.advantages[:4]
        torch.testing.assert_close(advantages, expected[:, None] * mask, atol=1e-5, rtol=1e-5)
        whole = whole.of(range(4, len(whole.sequences)))
    assert not whole.sequences


@pytest.mark.parametrize("method", METHODS)
def test_no_value_model_is_loaded(project: Project, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a critic was made")

    monkeypatch.setattr(layouts, "_value_model", refused)
    monkeypatch.setattr(layouts, "new_head", refused)
    stage, _ = open_stage(project(method), method)
    roles = load_roles(stage, load_tokenizer(stage.root / "data/tokenizer"))
    assert (roles.value_model, roles.trunk_value_head) == (None, None)
    assert all(name.startswith("policy.") for name in roles.trainable())
    assert len(roles.optimizer.param_groups) == 1


@pytest.mark.parametrize("method", METHODS)
def test_sizes_of_pieces_do_not_change_the_trajectory(project: Project, method: str) -> None:
    roots = []
    for name, sizes in {"whole": (4096, 16), "small": (120, 4)}.items():
        changes = {
            "updates": 2,
            "micro_batch_tokens": sizes[0],
            "rollout_batch_size": sizes[1],
            "normalise_advantages": False,
        }
        if method == "grpo":
            del changes["normalise_advantages"]
        root = project(method, name, **{method: changes})
        work(root, method)
        roots.append(root / "models" / method)
    assert largest_difference(*roots) < 5e-5
    assert largest_difference(roots[0], roots[0].parent / "sft") > 3e-4


def test_the_paged_engine_teaches_the_same(project: Project) -> None:
    roots = []
    for engine in ("static", "paged"):
        root = project("grpo", engine, grpo={"updates": 2, "rollout_engine": engine})
        work(root, "grpo")
        roots.append(root / "models/grpo")
    assert largest_difference(*roots) < 5e-5


@pytest.mark.parametrize("method", SAMPLING_METHODS)
def test_bf16_noise_between_sampling_and_learning_stays_within_the_clip_range(project: Project, method: str) -> None:
    """Ratios are of tokens: the noise of a whole response's would grow with its length. Kernels without vector
    instructions round alike in both forwards, and have none.
    """
    changes = {
        "updates": 1,
        "num_mini_batches": 1,
        f"{method}_epochs": 1,
        "max_new_tokens": 40,
        "learning_rate": 1.0e-3,
    }
    rows = {}
    for recompute in (False, True):
        root = project(
            method,
            f"recompute-{recompute}",
            model={"dtype": "bf16"},
            **{method: {**changes, "recompute_logprobs": recompute}},
        )
        work(root, method)
        (rows[recompute],) = (row.values for row in metric_rows(root, method))
    assert rows[False]["rollout_logprob_gap_max"] < 0.2
    assert rows[False]["clip_fraction"] == 0
    assert rows[False]["first_ratio_error"] < 0.2
    assert rows[True]["first_ratio_error"] < 1e-6


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, undisturbed: tuple[str, Path]
) -> None:
    method, straight = undisturbed
    root = project(method)
    killed_stopped_and_resumed(root, method, kill_at=4, stop_at=5)
    assert files(root / "models" / method) == files(straight / "models" / method)
    assert metrics(root, method) == metrics(straight, method)
    assert (root / f"plots/{method}.csv").read_bytes() == (straight / f"plots/{method}.csv").read_bytes()
    assert not list((root / "checkpoints" / method).glob("*/step-*"))


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_learns_on_the_sft_model_which_is_its_reference(project: Project, method: str) -> None:
    lora = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "up"], "dropout": 0.0}
    changes = {method: {"lora": lora, "updates": 3, "learning_rate": 1.0e-2, "checkpoint_every_updates": 1}}
    straight, interrupted = (project(method, name, **changes) for name in ("straight", "interrupted"))
    work(straight, method)
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(names(straight / "models" / method))
    assert "model.safetensors" not in names(straight / "models" / method)
    rows = [row.values for row in metric_rows(straight, method)]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(rows[-1]["kl"]) > 10 * abs(rows[0]["kl"])
    stop_after_a_step(interrupted, method)
    work(interrupted, method)
    assert files(interrupted / "models" / method) == files(straight / "models" / method)


@pytest.mark.parametrize("method", METHODS)
def test_training_ends_where_the_policy_leaves_the_sft_model_too_far(project: Project, method: str) -> None:
    root = project(method, **{method: {"max_kl": 0.001, "learning_rate": 0.01}})
    work(root, method)
    assert metrics(root, method)["updates"] == len(metric_rows(root, method)) < 8


# ---------------------------------------------------------------- bad input


def test_no_fitting_prompt_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("rloo", rloo={"max_new_tokens": 95}), "rloo")
    with pytest.raises(
        DataError, match=r"no prompt of at most 1 tokens \(model\.context_length - rloo\.max_new_tokens\)"
    ):
        run(stage)


@pytest.mark.parametrize(
    ("factor", "said"),
    [(0.0, "the reward model cannot tell them apart"), (float("nan"), r"grpo score is nan.*grpo\.learning_rate")],
)
def test_a_reward_model_that_cannot_teach_is_named_and_the_state_kept(
    project: Project, factor: float, said: str
) -> None:
    root = project("grpo")
    path = root / "models/reward/model.safetensors"
    weights = load_file(path)
    save_file({**weights, "score.weight": weights["score.weight"] * factor}, path, metadata={"format": "pt"})
    stage, run = open_stage(root, "grpo")
    with pytest.raises(TrainingDiverged, match=said):
        run(stage)
    assert names(stage.checkpoints.folder) == ["step-00000000"]
    assert not (root / "models/grpo").exists()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 16, "num_mini_batches": 3}, r"\.batch_size=16 does not split into \w+\.num_mini_batches=3"),
        (
            {"batch_size": 16, "responses_per_prompt": 3},
            r"\.batch_size=16 does not split into \w+\.responses_per_prompt=3",
        ),
        ({"lora": {"rank": 4, "alpha": 8.0, "modules": ["q"], "dropout": 0.1}}, r"\.lora\.dropout=0\.1"),
        ({"responses_per_prompt": 1}, r"\.responses_per_prompt=1"),
        ({"max_new_tokens": 96}, r"\.max_new_tokens=97 does not fit in model\.context_length=96"),
        ({"layout": "separate"}, r"\.layout is not a parameter"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(method: str, changes: dict, said: str) -> None:
    with pytest.raises(ParamsError, match=method + said):
        params(**{method: changes, "align": {"method": method}})


# ---------------------------------------------------------------- settings of the field


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_loss": "gspo", "cliprange": 0.01},
        {"policy_loss": "cispo", "cliprange_high": 1.0},
        {"cliprange_high": 0.4, "divide_by_deviation": False},
        {"refill": {"most_batches": 3}},
    ],
    ids=["gspo", "cispo", "dr_grpo", "refill"],
)
def test_each_setting_trains_and_resumes_to_the_bit(
    project: Project, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Scores of 0 and 1, so that there are groups to refill."""
    monkeypatch.setattr(loop, "scores", lambda _, __, rows: torch.tensor([1.0 * (len(ids) % 2) for ids in rows]))
    section = {"updates": 3, "checkpoint_every_updates": 1, "grpo_epochs": 2, **changes}
    whole, parts = (project("grpo", name, grpo=section) for name in ("whole", "parts"))
    work(whole, "grpo")
    for _ in range(3):
        stop_after_a_step(parts, "grpo")
    work(parts, "grpo")
    assert files(whole / "models/grpo") == files(parts / "models/grpo")
    kept = ("score", "policy_loss", "equal_groups", "equal_groups_taken")
    first, second = (
        [{name: row.values[name] for name in kept} for row in metric_rows(root, "grpo")] for root in (whole, parts)
    )
    assert first == second
