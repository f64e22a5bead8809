import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import jsonl
from config.errors import DataError, ParamsError, StageStopped, TrainingDiverged
from config.load import write
from config.records import UsageRow
from config.sections.online import Rloo
from tests.training.processes import killed_stopped_and_resumed, metric_rows, metrics
from tests.training.tiny import (
    files,
    names,
    open_stage,
    params,
    policy,
    prompts,
    reward_model,
    tokenizer,
    work,
)
from training.modeling.scoring import score
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.rl.rloo_rows import PromptOrder, rollout_statistics
from training.rloo import MeasuredRLOOTrainer, Policies

Project = Callable[..., Path]


def settings(**changes: object) -> Rloo:
    return params(rloo=changes).rloo


@pytest.fixture(scope="module")
def undisturbed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which rloo ran to its end."""
    root = tmp_path_factory.mktemp("rloo") / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    write(params(), root / "params.yaml")
    work(root, "rloo")
    return root


# ---------------------------------------------------------------- order


def test_every_prompt_comes_once_a_pass_and_once_for_each_response() -> None:
    chosen = settings(updates=6, batch_size=8, responses_per_prompt=2, num_mini_batches=1)
    order = list(PromptOrder(12, chosen, micro_batches=3, seed=3))
    assert len(order) == len(PromptOrder(12, chosen, micro_batches=3, seed=3)) == 6 * 8 * 3
    updates = [order[start : start + 24] for start in range(0, len(order), 24)]
    assert all(
        rows[:8] == rows[8:16] == rows[16:] and rows[0:8:2] == rows[1:8:2] for rows in updates
    )
    drawn = [i for rows in updates for i in rows[0:8:2]]
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12))
    assert drawn[:12] != drawn[12:]
    assert list(islice(PromptOrder(12, chosen, 3, seed=4), 24)) != updates[0]


def test_prompts_without_room_for_a_response_are_left_out(project: Project) -> None:
    stage, _ = open_stage(project("rloo", rloo={"max_new_tokens": 70}), "rloo")
    fitting = read_prompts(stage, load_tokenizer(stage.root / "data/tokenizer"))
    everything = len((stage.root / "data/prepared/prompts/train.jsonl").read_text().splitlines())
    assert 0 < len(fitting) < everything
    assert max(map(len, fitting)) <= 96 - 70


# ---------------------------------------------------------------- one rollout


def trainer_of(root: Path, family: str = "llama", **changes: object) -> MeasuredRLOOTrainer:
    """A trainer about to begin, its policy another one than its reference."""
    write(params(rloo=changes), root / "params.yaml")
    stage, _ = open_stage(root, "rloo")
    ref_policy = policy(seed=2, family=family).requires_grad_(False)
    judge = reward_model(family=family).requires_grad_(False)
    learner = policy(family=family)
    trainer = MeasuredRLOOTrainer(
        stage, tokenizer(), prompts(8), Policies(learner, learner, ref_policy), judge
    )
    trainer.model.train()
    return trainer


def rolled_out(trainer: MeasuredRLOOTrainer) -> dict[str, torch.Tensor]:
    chosen = trainer._settings
    rows = islice(iter(PromptOrder(8, chosen, 1, seed=1)), chosen.batch_size)
    return trainer._generate_and_score_completions([{"prompt": prompts(8)[i]} for i in rows])


def test_advantages_are_penalised_scores_against_the_mean_of_the_other_responses(
    tmp_path: Path, finished: Path
) -> None:
    root = shutil.copytree(
        finished, tmp_path / "project", ignore=shutil.ignore_patterns("runs", "checkpoints")
    )
    trainer = trainer_of(
        root,
        responses_per_prompt=4,
        max_new_tokens=60,
        beta=0.3,
        missing_eos_penalty=0.7,
        normalise_advantages=False,
    )
    batch = rolled_out(trainer)
    sequences, lengths = trainer._sequences, trainer._prompt_lengths
    score_B = score(trainer._reward_model, sequences, 1)
    ended_B = torch.tensor([ids[-1] == tokenizer().eos_token_id for ids in sequences])
    with torch.no_grad():
        kl_B = torch.stack(
            [
                total_logprob(trainer.model, s, n) - total_logprob(trainer.ref_model, s, n)
                for s, n in zip(sequences, lengths, strict=True)
            ]
        )
    reward_B = score_B - 0.7 * ~ended_B - 0.3 * kl_B
    groups = reward_B.view(4, 4)
    expected = groups - (groups.sum(dim=1, keepdim=True) - groups) / 3
    torch.testing.assert_close(batch["advantages"], expected.view(-1), atol=1e-3, rtol=0)
    assert float(kl_B.abs().mean()) > 1
    assert 0 < float(ended_B.float().mean()) < 1
    shown = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert shown["kl"] == pytest.approx(float(kl_B.mean()), abs=1e-3)
    assert shown["score"] == pytest.approx(float(score_B.mean()), abs=1e-5)


def total_logprob(model: torch.nn.Module, ids: list[int], prompt_length: int) -> torch.Tensor:
    """Of the response, from whole logits of the sequence alone."""
    logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], dim=-1)
    return logprobs.gather(1, torch.tensor(ids)[1:, None])[prompt_length - 1 :].sum()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_first_ratio_is_one_whatever_is_padded(
    tmp_path: Path, finished: Path, family: str
) -> None:
    root = shutil.copytree(
        finished, tmp_path / "project", ignore=shutil.ignore_patterns("runs", "checkpoints")
    )
    trainer = trainer_of(root, family, temperature=0.7)
    batch = rolled_out(trainer)
    assert not batch["prompt_mask"].all()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, batch["completion_ids"].shape[1]
    )
    ratio_B = ((logps * batch["completion_mask"]).sum(dim=1) - batch["old_logps"]).exp()
    torch.testing.assert_close(ratio_B, torch.ones(len(ratio_B)), atol=1e-3, rtol=0)


def test_statistics_are_means_over_responses_and_kl_is_per_response() -> None:
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    ref = [torch.tensor([-2.0, -3.0]), torch.tensor([-1.0])]
    found = rollout_statistics(torch.tensor([1.0, 3.0]), torch.tensor([True, False]), logprobs, ref)
    assert (found["score"], found["length"], found["eos_rate"], found["kl"]) == (2.0, 1.5, 0.5, 1.0)
    assert found["kl_error"] == pytest.approx(1.0)
    assert "kl" not in rollout_statistics(
        torch.tensor([1.0, 3.0]), torch.tensor([True, False]), logprobs, None
    )


# ---------------------------------------------------------------- training


def test_training_learns_what_is_paid_for_and_starts_at_the_reference(project: Project) -> None:
    """Ending is paid far above anything else: 0.1 of the responses end at first, 0.8 to 1 at last,
    with any seed and any CPU's sums.
    """
    changes = {
        "updates": 12,
        "learning_rate": 6.0e-3,
        "beta": 0.01,
        "max_new_tokens": 40,
        "batch_size": 48,
        "responses_per_prompt": 4,
    }
    root = project(
        "rloo", rloo={**changes, "missing_eos_penalty": 5.0, "checkpoint_every_updates": 100}
    )
    work(root, "rloo")
    rows = [row.values for row in metric_rows(root, "rloo") if "score" in row.values]
    assert len(rows) == 12
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-3)
    assert rows[0]["eos_rate"] < 0.3
    assert sum(row["eos_rate"] for row in rows[-3:]) / 3 > 0.6
    assert rows[-1]["kl"] > 0.1
    found = metrics(root, "rloo")
    assert (found["updates"], found["episodes"]) == (12, 12 * 48)
    assert found["score"] == pytest.approx(sum(row["score"] for row in rows[-5:]) / 5)


def test_every_token_is_accounted_in_each_phase(undisturbed: Path) -> None:
    rows = jsonl.read(undisturbed / "runs/rloo/usage.jsonl", UsageRow).rows
    per_update = {
        step: {
            row.phase: row.tokens
            for row in rows
            if row.step == step and row.phase not in ("save", "start", "other")
        }
        for step in range(1, 9)
    }
    for spent in per_update.values():
        assert set(spent) == {"rollout", "score", "reference", "update"}
        assert spent["score"] == spent["reference"] == spent["rollout"]
        assert spent["update"] == params().rloo.rloo_epochs * spent["rollout"]
    assert Counter(row.phase for row in rows)["update"] == params().rloo.updates


def test_without_a_penalty_no_reference_is_read(project: Project) -> None:
    root = project("rloo", rloo={"beta": 0.0, "updates": 2})
    work(root, "rloo")
    assert "reference" not in {
        row.phase for row in jsonl.read(root / "runs/rloo/usage.jsonl", UsageRow).rows
    }
    assert "kl" not in metric_rows(root, "rloo")[0].values
    assert "kl" not in metrics(root, "rloo")


def test_micro_batches_do_not_change_the_trajectory(project: Project) -> None:
    weights = []
    for micro_batch_size in (8, 2):
        root = project(
            "rloo",
            f"micro-{micro_batch_size}",
            rloo={"updates": 2, "micro_batch_size": micro_batch_size},
        )
        work(root, "rloo")
        weights.append(load_file(root / "models/rloo/model.safetensors"))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=5e-4, rtol=0, msg=name)


@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, undisturbed: Path
) -> None:
    root = project("rloo")
    killed_stopped_and_resumed(root, "rloo", kill_at=4, stop_at=5)
    assert files(root / "models/rloo") == files(undisturbed / "models/rloo")
    assert metrics(root, "rloo") == metrics(undisturbed, "rloo")
    assert (root / "plots/rloo.csv").read_bytes() == (undisturbed / "plots/rloo.csv").read_bytes()
    assert not list((root / "checkpoints/rloo").glob("*/step-*"))


def test_an_adapter_learns_on_the_sft_model_which_is_its_reference(project: Project) -> None:
    lora = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "up"], "dropout": 0.0}
    changes = {"lora": lora, "updates": 3, "learning_rate": 1.0e-2, "checkpoint_every_updates": 1}
    straight, interrupted = (
        project("rloo", name, rloo=changes) for name in ("straight", "interrupted")
    )
    work(straight, "rloo")
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(
        names(straight / "models/rloo")
    )
    assert "model.safetensors" not in names(straight / "models/rloo")
    rows = [row.values for row in metric_rows(straight, "rloo") if "kl" in row.values]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["kl"] > 10 * abs(rows[0]["kl"])
    assert (
        metrics(straight, "rloo")["learning_parameters"]
        < metrics(straight, "rloo")["parameters"] / 4
    )
    stage, run = open_stage(interrupted, "rloo")
    stage.stop_requested = True
    with pytest.raises(StageStopped):
        run(stage)
    work(interrupted, "rloo")
    assert files(interrupted / "models/rloo") == files(straight / "models/rloo")


# ---------------------------------------------------------------- bad input


def test_no_fitting_prompt_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("rloo", rloo={"max_new_tokens": 95}), "rloo")
    with pytest.raises(
        DataError,
        match=r"no prompt of at most 1 tokens \(model\.context_length - rloo\.max_new_tokens\)",
    ):
        run(stage)


def test_a_reward_model_that_tells_no_response_apart_ends_the_stage(project: Project) -> None:
    root = project("rloo")
    path = root / "models/reward/model.safetensors"
    weights = load_file(path)
    save_file(
        {**weights, "score.weight": weights["score.weight"] * 0}, path, metadata={"format": "pt"}
    )
    stage, run = open_stage(root, "rloo")
    with pytest.raises(TrainingDiverged, match="the reward model tells none apart"):
        run(stage)
    assert not (root / "models/rloo").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batch_size": 16, "num_mini_batches": 3},
            r"rloo\.batch_size=16 does not split into rloo\.num_mini_batches=3",
        ),
        (
            {"batch_size": 16, "responses_per_prompt": 3},
            r"rloo\.batch_size=16 does not split into rloo\.responses_per_prompt=3",
        ),
        (
            {"batch_size": 16, "micro_batch_size": 3},
            r"rloo\.micro_batch_size=3 does not divide a mini-batch of 8",
        ),
        (
            {"lora": {"rank": 4, "alpha": 8.0, "modules": ["q"], "dropout": 0.1}},
            r"rloo\.lora\.dropout=0\.1",
        ),
        ({"responses_per_prompt": 1}, r"rloo\.responses_per_prompt=1"),
        (
            {"max_new_tokens": 96},
            r"rloo\.max_new_tokens=97 does not fit in model\.context_length=96",
        ),
    ],
)
def test_settings_that_can_not_work_are_refused_in_one_line(changes: dict, said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        params(rloo=changes)
