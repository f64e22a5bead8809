"""Models divided among processes learn what whole ones learn, and a run can go on with another number of processes or
another division.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from config import jsonl
from config.records import UsageRow
from tests.training.conftest import copied
from tests.training.distributed.test_collectives import NOISE, largest_difference
from tests.training.support.crew import Job, run_together
from tests.training.support.processes import attempts, metric_rows, metrics
from tests.training.support.tiny import open_stage, stop_after_a_step, work
from training.distributed import sharding

pytestmark = [
    pytest.mark.timeout(900),  # one fixture does the work of all
    pytest.mark.usefixtures("forks"),
]
LORA = {"rank": 2, "alpha": 4.0, "modules": ["q", "v", "down"], "dropout": 0.0}
TRUNK = {
    "layout": "shared_trunk",
    "responses_per_prompt": 2,
    "micro_batch_tokens": 300,
    "updates": 4,
    "ppo_epochs": 2,
    "target_kl": 1.0,
    "checkpoint_every_updates": 100,
}
BASE = {
    "layout": "shared_base",
    "lora": LORA,
    "updates": 3,
    "micro_batch_tokens": 200,
    "activation_checkpointing": True,
    "learning_rate": 1.0e-2,
    "checkpoint_every_updates": 100,
}
EXCHANGED: dict[str, dict[str, Any]] = {
    "sft": {
        "micro_batch_size": 8,
        "checkpoint_every_steps": 100,
    },  # evaluated in micro-batches, so they are those of the other runs
    "reward": {"micro_batch_size": 2, "checkpoint_every_steps": 100},
    "dpo": {"micro_batch_size": 2, "checkpoint_every_steps": 100},
    "kto": {"micro_batch_size": 2, "checkpoint_every_steps": 100},
    "ppo": {"checkpoint_every_updates": 100},
    "rloo": {"checkpoint_every_updates": 100},
    "grpo": {"checkpoint_every_updates": 100},
}
LEVELS = {
    "sft": ("zero3", "zero2"),
    "reward": ("zero2", "zero3"),
    "dpo": ("none", "zero3"),
    "kto": ("none", "zero3"),
    "ppo": ("zero3", "zero2"),
    "rloo": ("zero3", "none"),
    "grpo": ("none", "zero2"),
}
STEPS_OF_EPOCH = 10


def first_ones(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Parameters of a test: those that are not among the quick ones are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


STRAIGHT = {"trunk-none": "none", "trunk-zero2": "zero2", "base-zero3": "zero3", "base-zero2": "zero2"}


@pytest.fixture(scope="module")
def ran(finished: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Projects by name. Of each stage one that was begun alone, went on divided, then divided otherwise, and was
    finished alone; and runs that two processes did from beginning to end: those that a test of this session asks for.
    """
    wanted = {
        value
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        for value in (item.callspec.params.values() if hasattr(item, "callspec") else ())
    }
    exchanged = [stage for stage in EXCHANGED if stage in wanted]
    straight = {name: level for name, level in STRAIGHT.items() if name in wanted}
    places = tmp_path_factory.mktemp("sharding")
    result = {stage: copied(finished, places / stage, stage, **{stage: EXCHANGED[stage]}) for stage in exchanged}
    jobs = []
    for stage, root in result.items():
        stop_after_a_step(root, stage)
        jobs += [Job(str(root), stage, level, stops=True) for level in LEVELS[stage]]
    adapted = copied(finished, places / "adapted", "reward", reward={"lora": LORA, "max_steps": 4})
    work(adapted, "reward")
    for name, level in straight.items():
        sections = (
            {"ppo": TRUNK} if name.startswith("trunk") else {"ppo": BASE, "reward": {"lora": LORA, "max_steps": 4}}
        )
        result[name] = copied(finished if name.startswith("trunk") else adapted, places / name, "ppo", **sections)
        jobs.append(Job(str(result[name]), "ppo", level, offload=level == "zero3"))
    run_together(jobs)
    for stage in exchanged:
        work(result[stage], stage)
    for name, of in {name.split("-")[0]: name for name in straight}.items():
        result[name] = copied(result[of], places / name, "ppo")
        (result[name] / "params.yaml").write_text((result[of] / "params.yaml").read_text(), encoding="utf-8")
        work(result[name], "ppo")
    for stage in [stage for stage in ("dpo", "kto", "rloo", "grpo") if stage in exchanged]:
        result[f"{stage}-alone"] = copied(finished, places / f"{stage}-alone", stage)
        work(result[f"{stage}-alone"], stage)
    return result


@pytest.mark.integration
@pytest.mark.parametrize("stage", first_ones(EXCHANGED, ["sft", "kto", "ppo"]))
def test_whoever_goes_on_and_however_it_is_divided_a_run_ends_with_the_same_weights(
    stage: str, ran: dict[str, Path], finished: Path
) -> None:
    root, alone = ran[stage], ran.get(f"{stage}-alone", finished)
    rows = attempts(root, stage)
    assert [(row.step, row.world_size) for row in rows if row.event == "end"] == [(2, 2), (3, 2)]
    assert [row.step for row in rows if row.event == "resume"] == [1, 2, 3]
    assert largest_difference(root / f"models/{stage}", alone / f"models/{stage}") < 2e-6


@pytest.mark.integration
@pytest.mark.parametrize("stage", first_ones(["sft", "reward", "dpo"], ["sft"]))
def test_each_step_of_a_trainer_is_that_of_one_process(stage: str, ran: dict[str, Path], finished: Path) -> None:
    root, alone = ran[stage], ran.get(f"{stage}-alone", finished)
    straight, shared = (
        {row.step: row.values for row in metric_rows(place, stage) if "loss" in row.values} for place in (alone, root)
    )
    assert straight.keys() == shared.keys()
    for step, values in straight.items():
        # the last batch is a short one
        whole = values.keys() & {"accuracy", "margin", "chosen_logps"} if step % STEPS_OF_EPOCH else set()
        for name in {"loss", "grad_norm"} | whole:
            assert shared[step][name] == pytest.approx(values[name], abs=2e-5, rel=1e-6), (step, name)
    ours, theirs = metrics(root, stage), metrics(alone, stage)
    assert ours == pytest.approx(theirs, abs=2e-5)


@pytest.mark.integration
@pytest.mark.parametrize("name", first_ones(STRAIGHT, ["base-zero3"]))
def test_every_update_of_ppo_is_that_of_one_process(name: str, ran: dict[str, Path]) -> None:
    example, two = ran[name.split("-")[0]], ran[name]
    files = [next((root / "models/ppo").glob("*.safetensors")) for root in (example, two)]
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    apart = [(first[key] - second[key]).abs() for key in first]
    # Adam takes a whole step by the sign of a gradient that is rounding alone
    assert max(float(item.max()) for item in apart) < 1e-4
    assert max(float(item.mean()) for item in apart) < 2e-6
    assert max(float(tensor.abs().max()) for tensor in first.values()) > 1e-3
    for alone, shared in zip(metric_rows(example, "ppo"), metric_rows(two, "ppo"), strict=True):
        for curve in alone.values.keys() - {"seconds"}:
            tolerance = 1e-4 if curve in NOISE else 1e-5
            assert shared.values[curve] == pytest.approx(
                alone.values[curve], rel=1e-3 if curve in NOISE else 1e-4, abs=tolerance
            ), curve
    rows = {root: jsonl.read(root / "runs/ppo/usage.jsonl", UsageRow).rows for root in (example, two)}
    assert {row.world_size for row in rows[two]} == {2}
    for phase in ("rollout", "score", "reference", "update"):
        counts = [
            [(row.step, row.tokens, row.sequences) for row in rows[root] if row.phase == phase]
            for root in (example, two)
        ]
        assert counts[0] == counts[1], phase


def test_nothing_is_divided_in_one_process(project: Callable[[str], Path]) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    parameter = torch.nn.Linear(3, 1)
    sharding.shard(parameter, stage)
    assert sharding.level(stage) == "none"
    assert sharding.run_as_forward([parameter], lambda: 7) == 7
    with sharding.unsharded(parameter, None):
        assert parameter.weight.shape == (1, 3)
