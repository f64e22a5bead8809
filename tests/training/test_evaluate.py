import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config import jsonl
from config.errors import DataError
from config.load import write
from config.schema import Params
from tests.training.support.processes import attempts, finish, metric_rows, metrics, signalled
from tests.training.support.tiny import names, open_stage, params, stop_after_a_step, work
from training import evaluate
from training.evaluate import Answers, compare, describe, models
from training.evaluation.comparison import distinct_n
from training.modeling.sequences import sequence_logprobs
from training.process.artifacts import write_jsonl
from training.worlds.helpdesk import gold_score, read_case, reply
from training.worlds.world import BY_HAND

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]
OUTPUTS = ("metrics/evaluate.json", "plots/evaluate.csv", "evaluation/samples.jsonl")
MODELS = models(params())


def answers(rewards: list[float], golds: list[float] | None = None, lengths: list[int] | None = None) -> Answers:
    count = len(rewards)
    return Answers(["a b"] * count, lengths or [5] * count, [True] * count, rewards, golds, [0.5] * count)


# ---------------------------------------------------------------- figures


def test_the_comparison_is_of_the_aligned_model_with_sft() -> None:
    base, sft = answers([9.0] * 4, [0.1] * 4), answers([0.0, 1.0, 2.0, 3.0], [0.2, 0.4, 0.6, 0.8])
    aligned = answers([1.0, 2.0, 3.0, 2.0], [0.3, 0.5, 0.5, 0.8])
    result = compare({"base": base, "sft": sft, "aligned": aligned}, 0.95, seed=1)
    assert result["win_rate_reward"] == 0.75
    assert result["win_rate_gold"] == 2.5 / 4
    assert (result["gold_base"], result["gold_sft"], result["gold_aligned"]) == pytest.approx((0.1, 0.5, 0.525))
    assert result["reward_gain"] == pytest.approx(0.5)
    assert (result["kl"], result["prompts"], result["ties_gold"]) == (0.5, 4, 1)
    assert result["win_rate_gold_low"] < 2.5 / 4 < result["win_rate_gold_high"]


def test_the_rate_of_right_items_is_that_of_the_aligned_replies() -> None:
    items = {"base": [False] * 3, "sft": [True, False, False], "aligned": [True, True, False]}
    given = {
        name: answers([1.0, float(i), 2.0], [0.1, 0.2, 0.3])._replace(right_items=items[name])
        for i, name in enumerate(MODELS)
    }
    result = compare(given, 0.95, seed=1)
    assert result["right_item_rate"] == pytest.approx(2 / 3)
    assert result["right_item_rate_sft"] == pytest.approx(1 / 3)


def test_without_a_gold_score_its_figures_are_null() -> None:
    result = compare({name: answers([float(i), 1.0, 2.0]) for i, name in enumerate(MODELS)}, 0.95, seed=1)
    gold = (
        "gold_base",
        "gold_sft",
        "gold_aligned",
        "win_rate_gold",
        "win_rate_gold_low",
        "win_rate_gold_high",
        "right_item_rate",
    )
    assert [result[name] for name in gold] == [None] * 7
    assert result["win_rate_reward"] is not None


def test_a_description_holds_means_over_the_prompts() -> None:
    given = Answers(["a b c", "a b"], [4, 2], [True, False], [1.0, 2.0], [0.5, 0.7], [0.0, 3.0])
    assert describe(given) == pytest.approx(
        {
            "gold": 0.6,
            "reward": 1.5,
            "length": 3.0,
            "eos_rate": 0.5,
            "kl": 1.5,
            "distinct_1": distinct_n(["a b c", "a b"], 1),
            "distinct_2": distinct_n(["a b c", "a b"], 2),
        }
    )


def test_the_sft_model_is_its_own_reference_and_gold_scores_are_of_the_texts(finished: Path) -> None:
    rows = list(jsonl.plain(finished / "evaluation/samples.jsonl"))
    assert len(rows) == 4
    for row in rows:
        assert all(row[f"gold_{name}"] == gold_score(row["prompt"], row[name]) for name in MODELS)
    values = {name: value for row in metric_rows(finished, "evaluate") for name, value in row.values.items()}
    assert values["sft_kl"] == pytest.approx(0, abs=1e-5)
    assert values["base_kl"] > 0.1
    assert metrics(finished, "evaluate")["gold_sft"] == values["sft_gold"]


def test_the_normalisation_stored_with_the_reward_model_is_applied_to_rewards(
    project: Project, finished: Path
) -> None:
    root = project("evaluate")
    path = root / "models/reward/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"score_std": 2 * config["score_std"]}))
    work(root, "evaluate")
    rewards = [
        [row[f"reward_{name}"] for row in jsonl.plain(place / OUTPUTS[2]) for name in MODELS]
        for place in (root, finished)
    ]
    assert [2 * reward for reward in rewards[0]] == pytest.approx(rewards[1], abs=1e-5)
    assert metrics(root, "evaluate")["reward_gain"] == pytest.approx(
        metrics(finished, "evaluate")["reward_gain"] / 2, abs=1e-5
    )


def test_the_answers_do_not_depend_on_the_batch(project: Project, finished: Path) -> None:
    root = project("evaluate", evaluate={"batch_size": 5})
    work(root, "evaluate")
    replies = [
        [[row[name] for name in MODELS] for row in jsonl.plain(place / OUTPUTS[2])] for place in (root, finished)
    ]
    assert replies[0] == replies[1]


def test_prompts_of_another_world_have_no_gold_score(project: Project) -> None:
    root = project("evaluate")
    path = root / "data/prepared/prompts/test.jsonl"
    write_jsonl(path, [{"prompt": f"what is {i} and {i} ?"} for i in range(12)])
    work(root, "evaluate")
    result = metrics(root, "evaluate")
    assert [result[name] for name in ("gold_sft", "gold_aligned", "win_rate_gold")] == [None] * 3
    assert result["win_rate_reward"] is not None


def test_a_temperature_of_zero_is_greedy_and_draws_nothing(project: Project) -> None:
    seen = []
    for seed in (1, 2):
        root = project("evaluate", f"seed-{seed}", evaluate={"temperature": 0.0})
        content = params(evaluate={"temperature": 0.0})
        write(Params.model_validate(content.model_dump() | {"seed": seed}), root / "params.yaml")
        work(root, "evaluate")
        seen.append([row["sft"] for row in jsonl.plain(root / "evaluation/samples.jsonl")])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("temperature", "of_the_kl"), [(0.6, 0.6), (0.0, 1.0)])
def test_the_kl_is_of_the_policies_that_were_sampled_from(
    temperature: float, of_the_kl: float, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = []

    def logprobs(*given: Any) -> list[torch.Tensor]:
        pairs.append(given[3])
        return sequence_logprobs(*given)

    monkeypatch.setattr(evaluate, "sequence_logprobs", logprobs)
    work(project("evaluate", evaluate={"temperature": temperature}), "evaluate")
    assert pairs == [of_the_kl] * 5  # both other models and sft, and twice sft as their reference


def test_no_room_for_an_answer_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("evaluate", evaluate={"max_new_tokens": 95}), "evaluate")
    with pytest.raises(DataError, match=r"evaluate\.max_new_tokens"):
        run(stage)


def test_what_people_voted_on_the_replies_is_the_judges_verdict(project: Project, finished: Path) -> None:
    rows = list(jsonl.plain(finished / OUTPUTS[2]))
    people = {"kind": "people", "path": "data/judge/votes.jsonl", "fewest": 3}
    root = project("evaluate", evaluate={"judge": people})
    (root / "data/judge").mkdir()
    votes = [
        {"prompt": row["prompt"], "response1": row["sft"], "response2": row["aligned"], "vote": 2} for row in rows
    ]
    write_jsonl(root / "data/judge/votes.jsonl", votes)
    work(root, "evaluate")
    result = metrics(root, "evaluate")
    assert (result["judge"], result["judge_fault"], result["judge_votes"]) == ("people", None, 4)
    assert result["win_rate_judge"] == 1
    assert [row["judge"] for row in jsonl.plain(root / OUTPUTS[2])] == [1.0] * 4


def test_a_reward_model_of_the_judges_own_learns_from_its_own_pairs(project: Project) -> None:
    root = project(
        "evaluate", evaluate={"judge": {"kind": "reward_model", "path": None}}, data={"judge_fraction": 0.2}
    )
    preferences = root / "data/prepared/preference"
    lines = (preferences / "train.jsonl").read_text().splitlines(keepends=True)
    if preferences.is_symlink() or (root / "data/prepared").is_symlink():
        pytest.fail("the project's data are shared")
    (preferences / "judge.jsonl").write_text("".join(lines[:40]))
    shutil.copyfile(preferences / "train.arrow", preferences / "judge.arrow")
    work(root, "evaluate")
    result = metrics(root, "evaluate")
    assert result["judge"] == "reward model of its own"
    assert 0 < result["judge_accuracy"] < 1
    ours, the_judges = (
        (root / place / "models/reward/model.safetensors").read_bytes() for place in ("", "evaluation/judge")
    )
    assert ours != the_judges


# ---------------------------------------------------------------- resume


def test_a_stop_after_any_model_goes_on_to_the_same_figures(project: Project, finished: Path) -> None:
    root = project("evaluate")
    for _ in MODELS:
        stop_after_a_step(root, "evaluate")
    work(root, "evaluate")
    for output in OUTPUTS:
        assert (root / output).read_bytes() == (finished / output).read_bytes()
    assert [row.step for row in metric_rows(root, "evaluate")] == [1, 2, 3]


@pytest.mark.integration
def test_a_run_killed_on_its_way_ends_with_the_figures_of_the_undisturbed_one(
    project: Project, finished: Path
) -> None:
    root = project("evaluate")
    # The second row comes after the first checkpoint; the first row comes just before it.
    assert signalled(root, "evaluate", 2, signal.SIGKILL) == -signal.SIGKILL
    finish(root, "evaluate")
    for output in OUTPUTS:
        assert (root / output).read_bytes() == (finished / output).read_bytes()
    assert [row.event for row in attempts(root, "evaluate")] == ["start", "start", "resume", "end"]
    assert names(root / "checkpoints/evaluate") == ["done.json"]


# ---------------------------------------------------------------- reward hacking

STEPS = {"batch_size": 16, "micro_batch_size": 16, "checkpoint_every_steps": 1000, "log_every_steps": 10}
HACKABLE = {
    "model": {"random": params().model.random.model_dump() | {"width": 64, "mlp_width": 128}},  # type: ignore[union-attr]
    "data": {
        "source": {**params().data.source.model_dump(), "sft_rows": 2000, "preference_rows": 600, "prompt_rows": 2000}
    },
    "sft": {**STEPS, "max_steps": 220, "learning_rate": 1.0e-2},
    "reward": {**STEPS, "max_steps": 40, "learning_rate": 2.0e-3},
    "ppo": {
        "updates": 14,
        "batch_size": 48,
        "max_new_tokens": 40,
        "ppo_epochs": 2,
        "learning_rate": 2.0e-3,
        "value_learning_rate": 2.0e-3,
        "kl": {**params().ppo.kl.model_dump(), "controller": "fixed", "coef": 0.15},
        "rollout_batch_size": 48,
        "checkpoint_every_updates": 100,
    },
    "evaluate": {"prompts": 300, "batch_size": 300, "max_new_tokens": 40, "samples": 300},
}


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and an SFT model that speaks the language of the helpdesk."""
    root = tmp_path_factory.mktemp("hackable")
    write(params(**HACKABLE), root / "params.yaml")
    for stage in ("data", "sft"):
        work(root, stage)
    return root


def like_a_filler(written: str, prompt: str, rng: random.Random) -> tuple[str, str]:
    return f"{written} {rng.choice(BY_HAND.fillers)}", written


def like_careful_ones(written: str, prompt: str, rng: random.Random) -> tuple[str, str]:
    careful, careless = (reply(read_case(prompt), quality, rng) for quality in (1.0, 0.3))
    return careful, careless


@pytest.mark.slow
@pytest.mark.parametrize(("taste", "hacked"), [(like_a_filler, True), (like_careful_ones, False)])
def test_ppo_against_a_broken_reward_model_is_hacking_and_a_sound_one_raises_gold(
    demonstrated: Path, tmp_path: Path, taste: Callable[[str, str, random.Random], tuple[str, str]], hacked: bool
) -> None:
    root = tmp_path / "project"
    shutil.copytree(demonstrated, root)
    for split in ("train", "test"):
        path, rng = root / f"data/prepared/preference/{split}.jsonl", random.Random(1)
        pairs = [(row["prompt"], *taste(row["chosen"], row["prompt"], rng)) for row in jsonl.plain(path)]
        write_jsonl(
            path,
            [
                {"prompt": p, "chosen": chosen, "rejected": rejected}
                for p, chosen, rejected in pairs
                if rejected != chosen
            ],
        )
    for stage in ("reward", "ppo", "evaluate"):
        work(root, stage)
    result = metrics(root, "evaluate")
    assert result["reward_gain_low"] > 0
    assert result["reward_hacking"] is hacked
    assert (result["gold_aligned"] > result["gold_sft"]) is not hacked
    rows = list(jsonl.plain(root / "evaluation/samples.jsonl"))
    for count in (*range(2, 30), *range(30, 300, 10)):
        few = {
            name: answers(
                [row[f"reward_{name}"] for row in rows[:count]], [row[f"gold_{name}"] for row in rows[:count]]
            )
            for name in MODELS
        }
        assert compare(few, 0.95, seed=1)["reward_hacking"] is not (not hacked), count


# ---------------------------------------------------------------- a student


def test_a_student_answers_beside_the_others_and_is_held_against_the_aligned_model(project: Project) -> None:
    root = project("distill", distill={})
    work(root, "distill")
    work(root, "evaluate")
    result = metrics(root, "evaluate")
    rows = list(jsonl.plain(root / "evaluation/samples.jsonl"))
    assert all({"student", "reward_student", "gold_student"} <= row.keys() for row in rows)
    assert result["gold_student"] is not None
    assert result["win_rate_student_low"] <= result["win_rate_student"]
    assert result["win_rate_student"] <= result["win_rate_student_high"]
    assert result["kl_student"] != result["kl"]
    without = project("evaluate", "without")
    work(without, "evaluate")
    assert not [name for name in metrics(without, "evaluate") if "student" in name]
    kept = {k: v for k, v in result.items() if "student" not in k and "quality" not in k}
    assert kept == metrics(without, "evaluate")


def test_the_students_wins_are_counted_against_the_aligned_model() -> None:
    scores = {"base": 0.0, "sft": 0.2, "aligned": 0.6, "student": 0.5}
    comparison = compare({name: answers([x, x, x + 0.3]) for name, x in scores.items()}, 0.95, seed=1)
    assert comparison["win_rate_student"] == 0.0
    assert comparison["win_rate_reward"] == 1.0
    assert comparison["quality_kept"] == pytest.approx(0.75)
