"""Stage `distill`: what it computes against plain torch, what it leaves behind, and that a run that was killed or
divided ends where an undisturbed one does.
"""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import training.distill as loop
from config.errors import ModelError, TrainingDiverged
from config.jsonl import read
from config.load import write
from config.records import UsageRow
from config.sections.distillation import Distill
from config.student import OUTS, write_no_student
from tests.training.conftest import copied
from tests.training.support.processes import (
    attempts,
    finish,
    killed_stopped_and_resumed,
    metric_rows,
    metrics,
    signalled,
)
from tests.training.support.tiny import files, open_stage, params, run_main, work
from training.distillation.student import load_pair
from training.modeling.models import base_model, load_policy
from training.modeling.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


def own_tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(root / "data/tokenizer")


def weights(root: Path) -> dict[str, Tensor]:
    return dict(load_file(root / "models/distill/model.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which the stage ran once. Read it."""
    root = copied(finished, tmp_path_factory.mktemp("distill") / "project", "distill", distill={})
    work(root, "distill")
    return root


def test_it_leaves_a_model_that_loads_and_figures_of_both(undisturbed: Path) -> None:
    result = metrics(undisturbed, "distill")
    assert result["updates"] == 8
    assert result["responses"] == 64
    assert result["parameters_student"] < result["parameters_teacher"] / 3
    assert 0 < result["loss"] < 10
    assert 0 <= result["agreement"] <= 1
    student = load_policy(undisturbed / "models/distill", params().model, own_tokenizer(undisturbed))
    assert student.num_parameters() == result["parameters_student"]
    rows = metric_rows(undisturbed, "distill")
    assert ["agreement" in row.values for row in rows] == [False] * 2 + [True] * 6
    assert rows[-1].values["loss"] < rows[2].values["loss"]


def test_every_phase_is_measured_where_it_happens(undisturbed: Path) -> None:
    rows = read(undisturbed / "runs/distill/usage.jsonl", UsageRow).rows
    steps = {
        name: [row.step for row in rows if row.phase == name]
        for name in ("student_rollout", "teacher_rollout", "teacher_logprobs", "update")
    }
    assert steps["student_rollout"] == steps["teacher_logprobs"] == [3, 4, 5, 6, 7, 8]
    assert steps["teacher_rollout"] == steps["update"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {row.sequences for row in rows if row.phase == "student_rollout"} == {4}
    assert {row.sequences for row in rows if row.phase == "update"} == {16}


# ---------------------------------------------------------------- what it computes


EVERYTHING: dict[str, Any] = {
    "activation_checkpointing": True,
    "updates": 5,
    "batch_size": 12,
    "responses_per_prompt": 3,
    "max_new_tokens": 9,
    "temperature": 0.7,
    "rollout_batch_size": 4,
    "num_mini_batches": 3,
    "micro_batch_tokens": 90,
    "learning_rate": 3.0e-3,
    "schedule": "linear",
    "max_grad_norm": 0.2,
    "checkpoint_every_updates": 2,
    "sample_every_updates": 3,
    "sft_updates": 1,
    "lmbda": 0.75,
    "beta": 0.3,
    "distill_epochs": 2,
}


class Plain(NamedTuple):
    weights: dict[str, Tensor]
    losses: list[float]
    rates: list[float]
    norms: list[float]


def plain_distillation(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    batches: list[tuple[list[list[int]], list[int], list[list[int]]]],
    settings: Distill,
) -> Plain:
    """The same in plain torch: dense logits, one sequence at a time. `batches` are (sequences, where responses start,
    mini-batches) of every update.
    """
    optimizer = torch.optim.AdamW(student.parameters(), lr=1.0, weight_decay=0.0)
    losses, rates, norms = [], [], []
    for update, (sequences, starts, minis) in enumerate(batches):
        rate = settings.learning_rate * (1 - update / settings.updates)
        optimizer.param_groups[0]["lr"] = rate
        total, tokens, by_update = 0.0, 0, []
        for rows in minis:
            loss, count = torch.zeros(()), 0
            for i in rows:
                ids, targets = torch.tensor([sequences[i]]), torch.tensor(sequences[i])
                place = slice(starts[i] - 1, len(sequences[i]) - 1)
                q = torch.log_softmax(student(input_ids=ids).logits[0, place] / settings.temperature, dim=1)
                with torch.no_grad():
                    p = torch.log_softmax(teacher(input_ids=ids).logits[0, place] / settings.temperature, dim=1)
                if update < settings.sft_updates:
                    loss = loss - q.gather(1, targets[starts[i] :, None]).sum()
                else:
                    b = settings.beta
                    m = (b * p.exp() + (1 - b) * q.exp()).log()
                    loss = loss + b * (p.exp() * (p - m)).sum()
                    loss = loss + (1 - b) * (q.exp() * (q - m)).sum()
                count += len(q)
            optimizer.zero_grad()
            (loss / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(student.parameters(), settings.max_grad_norm)
            by_update.append(float(norm))
            optimizer.step()
            total, tokens = total + float(loss.detach()), tokens + count
        losses.append(total / tokens)
        rates.append(rate)
        norms.append(sum(by_update) / len(by_update))
    return Plain(student.state_dict(), losses, rates, norms)


def test_a_run_with_every_setting_off_its_default_is_the_same_in_plain_torch(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project("distill", distill=EVERYTHING)
    stage, run = open_stage(root, "distill")
    settings = stage.params.section("distill")
    pair = load_pair(stage, own_tokenizer(root))
    student, teacher = pair.student, pair.teacher
    batches: list[tuple[list[list[int]], list[int], list[list[int]]]] = []
    rolled_out: list[tuple[int, int]] = []
    joined, mini_batches, roll_out = loop.joined, loop.mini_batches, loop.roll_out

    def seen_joined(*given: Any) -> Any:
        result = joined(*given)
        batches.append((*result, []))
        return result

    def seen_minis(*given: Any) -> Any:
        batches[-1][2].extend(result := mini_batches(*given))
        return result

    def seen_roll_out(backoff: Any, model: Any, batch: Any, *given: Any) -> Any:
        rolled_out.append((model.config.hidden_size, len(batch)))
        return roll_out(backoff, model, batch, *given)

    monkeypatch.setattr(loop, "joined", seen_joined)
    monkeypatch.setattr(loop, "mini_batches", seen_minis)
    monkeypatch.setattr(loop, "roll_out", seen_roll_out)
    run(stage)
    assert rolled_out == [(32, 12), *[(16, 9), (32, 3)] * 4]
    assert all(len(rows) == 6 for _, _, rows in batches)
    plain = plain_distillation(student, teacher, batches, settings)
    rows = metric_rows(root, "distill")
    assert [row.values["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-4)
    assert [row.values["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-3)
    assert [row.values["learning_rate"] for row in rows] == pytest.approx(plain.rates)
    for name, tensor in weights(root).items():
        torch.testing.assert_close(tensor, plain.weights[name], rtol=1e-3, atol=2e-5)


def test_lmbda_is_the_share_of_prompts_that_the_student_answers() -> None:
    def responses(lmbda: float, update: int) -> int:
        settings = params(distill={"lmbda": lmbda}).section("distill")
        return loop.student_responses(settings, update)

    assert [responses(1.0, update) for update in (1, 2, 3)] == [0, 0, 8]
    assert [responses(share, 3) for share in (0.0, 0.25, 0.5)] == [0, 2, 4]


def test_a_student_that_runs_away_is_stopped(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project("distill", distill={"sft_updates": 0, "updates": 12})
    stage, run = open_stage(root, "distill")
    lengths = iter([(16.0, 1.0)] * 6 + [(16.0, 0.1)] * 6)

    def statistics(*_: Any) -> dict[str, float]:
        length, ended = next(lengths)
        return {"length": 9.0, "student_length": length, "student_eos_rate": ended}

    monkeypatch.setattr(loop, "response_statistics", statistics)
    with pytest.raises(TrainingDiverged, match="of the student's responses end"):
        run(stage)
    assert stage.step < 12
    assert not (root / "models/distill").exists()


# ---------------------------------------------------------------- where a student comes from


def test_a_student_of_the_teachers_layers_starts_near_it(project: Project) -> None:
    student = {"random": None, "layers": 1}
    root = project("distill", distill={"student": tiny_student(student), "updates": 2})
    work(root, "distill")
    content = json.loads((root / "models/distill/config.json").read_text())
    assert content["num_hidden_layers"] == 1
    assert content["hidden_size"] == 32


def tiny_student(changes: dict[str, Any]) -> dict[str, Any]:
    return {"path": None, "revision": None, "random": None, "layers": None} | changes


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "modules": ["q"], "dropout": 0.0}])
def test_a_student_from_a_folder_learns_whole_or_with_an_adapter(
    project: Project, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tiny_student({"path": "models/small"})
    root = project("distill", distill={"student": student, "updates": 3, "lora": lora})
    start = base_model(params().model, own_tokenizer(root), seed=7)
    start.save_pretrained(root / "models/small")
    shutil.copytree(root / "data/tokenizer", root / "models/small", dirs_exist_ok=True)
    monkeypatch.chdir(root)
    work(root, "distill")
    policy = load_policy(root / "models/distill", params().model, own_tokenizer(root))
    ids = torch.tensor([[5, 6, 7, 8]])
    changed = policy(input_ids=ids).logits - start(input_ids=ids).logits
    assert changed.abs().max() > 1e-4
    assert (root / "models/distill/adapter_model.safetensors").exists() == (lora is not None)


def test_a_student_of_another_tokenizer_is_refused_before_anything_is_sampled(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tiny_student({"path": "models/small"})
    root = project("distill", distill={"student": student})
    other = own_tokenizer(root)
    other.add_tokens(["kettle-kettle"])
    other.save_pretrained(root / "models/small")
    monkeypatch.chdir(root)
    stage, run = open_stage(root, "distill")
    with pytest.raises(ModelError, match=r"distill\.student\.path=models/small .* tokens differ"):
        run(stage)
    rows = read(root / "runs/distill/usage.jsonl", UsageRow).rows
    assert not [row for row in rows if row.phase != "start"]


# ---------------------------------------------------------------- no student


def test_without_a_section_the_stage_says_so_and_keeps_an_earlier_student(project: Project, undisturbed: Path) -> None:
    root = project("distill")
    assert run_main(root, "distill") == 0
    assert all((root / out).exists() for out in OUTS)
    assert metrics(root, "distill") == {}
    for out in OUTS:
        shutil.rmtree(root / out) if (root / out).is_dir() else (root / out).unlink()
    shutil.copytree(undisturbed / "models/distill", root / "models/distill")
    write_no_student(root)
    assert files(root / "models/distill") == files(undisturbed / "models/distill")


# ---------------------------------------------------------------- resume, several processes


@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, undisturbed: Path
) -> None:
    root = project("distill", distill={})
    killed_stopped_and_resumed(root, "distill", kill_at=4, stop_at=6)
    assert files(root / "models/distill") == files(undisturbed / "models/distill")
    assert metrics(root, "distill") == metrics(undisturbed, "distill")


@pytest.mark.integration
@pytest.mark.parametrize("sharding", ["none", pytest.param("zero3", marks=pytest.mark.slow)])
def test_two_processes_go_the_way_of_one(project: Project, undisturbed: Path, sharding: str) -> None:
    root = project("distill", distill={})
    place = {"default": {"pool": "local", "nodes": 1, "processes": 1, "sharding": sharding, "offload": False}}
    write(params(distill={}, where=place), root / "params.yaml")
    assert signalled(root, "distill", 4, signal.SIGTERM, processes=2) == 75
    stopped = attempts(root, "distill")[-1]
    assert stopped.world_size == 2
    finish(root, "distill", processes=2)
    alone = weights(undisturbed)
    for name, tensor in weights(root).items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-4)
