import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from config.errors import TrainingDiverged
from config.jsonl import read
from config.load import load
from config.records import UsageRow
from tasks.planning.steps import planned_steps
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import files, names, open_stage, stop_after_a_step, work
from training.distributed.shards import WEIGHTS
from training.hf.trainer import CountingCollator, arguments, largest_divisor

Project = Callable[..., Path]


def test_every_parameter_reaches_the_trainer(project: Project) -> None:
    changes = {
        "batch_size": 12,
        "micro_batch_size": 3,
        "learning_rate": 7.0e-4,
        "warmup_fraction": 0.25,
        "schedule": "linear",
        "weight_decay": 0.03,
        "max_grad_norm": 0.7,
        "activation_checkpointing": True,
        "checkpoint_every_steps": 11,
        "log_every_steps": 13,
    }
    stage, _ = open_stage(project("sft", sft=changes), "sft")
    given = TrainingArguments(**arguments(stage, stage.params.sft))
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (3, 4)
    assert (given.learning_rate, given.weight_decay, given.max_grad_norm) == (7.0e-4, 0.03, 0.7)
    assert (given.get_warmup_steps(40), given.lr_scheduler_type) == (10, "linear")
    assert (given.gradient_checkpointing, given.save_steps, given.logging_steps, given.seed) == (True, 11, 13, 1)
    assert given.report_to == []


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"),
    [
        (0.5, None, 5),
        (1.5, 4, 4),
        pytest.param(1.5, 100, 15, marks=pytest.mark.slow),
        pytest.param(1.5, 15, 15, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("stage_name", ["sft", "reward", "dpo"])
def test_training_ends_with_the_epochs_or_at_max_steps_whichever_comes_first(
    project: Project, stage_name: str, epochs: float, max_steps: int | None, steps: int
) -> None:
    root = project(
        stage_name, **{stage_name: {"epochs": epochs, "max_steps": max_steps, "checkpoint_every_steps": 100}}
    )
    rows = len(
        (root / f"data/prepared/{'sft' if stage_name == 'sft' else 'preference'}/train.jsonl").read_text().splitlines()
    )
    assert math.ceil(rows / 8) == 10
    work(root, stage_name)
    assert metrics(root, stage_name)["steps"] == steps == planned_steps(root, load(root / "params.yaml"), stage_name)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [pytest.param("constant", [1, 1], marks=pytest.mark.slow), ("linear", [0.5, 0.1]), ("cosine", [0.5, 0.0245])],
)
def test_learning_rates_rise_and_fall_as_the_schedule_says(
    project: Project, schedule: str, factors: list[float]
) -> None:
    root = project("sft", sft={"max_steps": 20, "warmup_fraction": 0.5, "schedule": schedule, "learning_rate": 1.0e-3})
    work(root, "sft")
    rates = {
        row.step: row.values["learning_rate"] for row in metric_rows(root, "sft") if "learning_rate" in row.values
    }
    assert rates[6] == pytest.approx(0.5e-3)  # after five of ten warm-up steps
    assert [rates[16] / 1e-3, rates[20] / 1e-3] == pytest.approx(factors, abs=1e-3)


@pytest.mark.parametrize(("number", "limit", "largest"), [(8, 8, 8), (4, 8, 4), (12, 5, 4), (7, 4, 1), (64, 100, 64)])
def test_micro_batches_are_the_largest_that_divide_the_batch(number: int, limit: int, largest: int) -> None:
    assert largest_divisor(number, limit) == largest


def test_the_collator_counts_real_tokens_and_rows() -> None:
    def collate(examples: list[dict]) -> dict[str, Any]:
        # the last one fills up
        return {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])}

    collator = CountingCollator(collate)
    collator([{}, {}])
    collator([{}, {}])
    picked = collator.take()
    assert (picked.tokens, picked.sequences) == (10, 4)
    assert (collator.take().tokens, collator.work.tokens) == (0, 0)


def test_each_epoch_has_all_rows_in_an_order_of_its_own(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    plain = CountingCollator.__call__

    def watching(self: CountingCollator, examples: list[dict]) -> Any:
        seen.extend(tuple(example["input_ids"]) for example in examples)
        return plain(self, examples)

    monkeypatch.setattr(CountingCollator, "__call__", watching)
    root = project("sft", sft={"epochs": 2.0})
    work(root, "sft")
    rows = len((root / "data/prepared/sft/train.jsonl").read_text().splitlines())
    first, second = seen[:rows], seen[rows : 2 * rows]
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_loss_that_is_no_number_is_named_and_no_model_appears(project: Project) -> None:
    root = project("reward")
    path = root / "models/sft/model.safetensors"
    save_file({name: weight * math.nan for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})
    stage, run = open_stage(root, "reward")
    with pytest.raises(TrainingDiverged, match=r"reward loss is nan at step 1: .*reward\.learning_rate"):
        run(stage)
    assert not (root / "models/reward").exists()


def test_a_damaged_checkpoint_falls_back_and_still_ends_with_the_same_bits(
    project: Project, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = project("sft")
    for _ in range(3):
        stop_after_a_step(root, "sft")
    (folder,) = (root / "checkpoints/sft").iterdir()
    assert [name for name in names(folder) if name != "trainer"] == ["step-00000002", "step-00000003"]
    weights = next((folder / "step-00000003" / WEIGHTS).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        work(root, "sft")
    assert any(f"{weights.name} has" in record.getMessage() for record in caplog.records)
    assert files(root / "models/sft") == files(finished / "models/sft")


def test_a_run_stopped_after_its_last_step_is_done(project: Project) -> None:
    root = project("sft", sft={"max_steps": 1})
    stage, run = open_stage(root, "sft")
    stage.stopper.requested = True
    run(stage)
    assert (root / "models/sft/model.safetensors").exists()


@pytest.mark.parametrize(
    ("stage_name", "length"),
    [
        ("sft", {"max_steps": 8}),
        pytest.param("sft", {"epochs": 1.0}, marks=pytest.mark.slow),
        pytest.param("reward", {"max_steps": 8}, marks=pytest.mark.slow),
        ("reward", {"epochs": 1.0}),
    ],
)
def test_a_run_killed_after_its_last_checkpoint_only_writes_its_outputs(
    project: Project, stage_name: str, length: dict
) -> None:
    changes = {**length, "checkpoint_every_steps": 1, "schedule": "constant"}
    root = project(stage_name, **{stage_name: changes})
    stage, run = open_stage(root, stage_name)
    stage.checkpoints.clear = lambda: None  # type: ignore[method-assign] # what a kill just before it leaves
    run(stage)
    straight = {name: files(root / name) for name in (f"models/{stage_name}", "metrics", "plots")}
    before = len(read(root / f"runs/{stage_name}/usage.jsonl", UsageRow).rows)
    work(root, stage_name)
    again = read(root / f"runs/{stage_name}/usage.jsonl", UsageRow).rows[before:]
    assert {row.phase for row in again} == {"start", "evaluate", "save", "other"}
    assert {name: files(root / name) for name in straight} == straight
