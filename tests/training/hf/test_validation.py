"""A validation split chooses the checkpoint, and says from which step on a model overfits."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config import jsonl
from config.errors import ParamsError
from config.load import write
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics, start
from tests.training.support.tiny import files, params, run_main, work
from training.evaluation.overfitting import RowLosses, fitted_temperature, is_worse, pair_losses
from training.preparation.splits import split_of

pytestmark = pytest.mark.usefixtures("forks")

SMALL = {"epochs": 12.0, "checkpoint_every_steps": 4, "keep": "best"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data with a validation split, so few rows that every stage overfits, and an SFT model."""
    root = tmp_path_factory.mktemp("small")
    write(small_params(), root / "params.yaml")
    assert run_main(root, "data") == 0
    assert run_main(root, "sft") == 0
    return root


def small_params(**sections: Any) -> Any:
    learning: dict[str, Any] = {
        "sft": SMALL | {"learning_rate": 3.0e-2, "epochs": 60.0},
        "reward": SMALL | {"learning_rate": 2.0e-2, "epochs": 20.0},
        "dpo": SMALL | {"learning_rate": 1.0e-2},
        "kto": SMALL | {"learning_rate": 1.0e-2},
    }
    for name, section in sections.items():
        learning[name] = learning.get(name, {}) | section
    return params(
        data={
            "validation_fraction": 0.6,
            "source": params().data.source.model_dump() | {"sft_rows": 60, "preference_rows": 200},
        },
        align={"method": "dpo"},
        **learning,
    )


def copy_of(small: Path, root: Path, stage: str, **sections: Any) -> Path:
    for part in ("data", "metrics", "models"):
        if (small / part).exists():
            (root / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(small / part, root / part)
    write(small_params(**sections), root / "params.yaml")
    return root


def test_validation_prompts_are_in_no_other_split(small: Path) -> None:
    prompts: dict[str, set[str]] = {}
    for path in (small / "data/prepared").glob("*/*.jsonl"):
        if path.parent.name != "prompts":
            prompts.setdefault(path.stem, set()).update(row["prompt"] for row in jsonl.plain(path))
    assert set(prompts) == {"train", "validation", "test"}
    assert len(prompts["validation"]) > 5
    assert not prompts["validation"] & (prompts["train"] | prompts["test"])
    names = {path.name for path in (small / "data/prepared/prompts").iterdir()}
    assert names == {f"{split}.{kind}" for split in ("train", "test") for kind in ("jsonl", "arrow")}


def test_new_fractions_move_only_prompts_of_training() -> None:
    for i in range(200):
        before, after = split_of(f"p {i}", 0.2, 0.1), split_of(f"p {i}", 0.2, 0.1, 0.2)
        assert after == before or (before, after) == ("train", "validation")


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "kto"])
def test_the_model_is_that_of_the_checkpoint_with_the_least_validation_loss(
    stage: str, small: Path, tmp_path: Path
) -> None:
    root = copy_of(small, tmp_path, stage)
    work(root, stage)
    result = metrics(root, stage)
    looks = {row.step: row.values for row in metric_rows(root, stage) if "validation_loss" in row.values}
    assert {"validation_loss", "test_loss"} <= set(looks[4])
    best = min(looks, key=lambda step: looks[step]["validation_loss"])
    last = max(looks)
    assert last == result["steps"]
    assert best < last
    assert result["kept_step"] == best
    assert result["validation_loss"] == looks[best]["validation_loss"]
    # KTO's loss is bounded, so that its rise is seldom beyond doubt
    assert result["overfits_from"] in ((best, None) if stage == "kto" else (best,))
    if stage in ("reward", "dpo"):
        assert result["temperature"] > 0
        assert result["ece_at_temperature"] >= 0
    # its test loss is that of the step it was kept from, not of the last one
    assert looks[last]["test_loss"] > looks[best]["test_loss"] or stage == "kto"
    if stage == "sft":  # TRL's is a mean over batches
        assert result["eval_loss"] == pytest.approx(looks[best]["test_loss"], rel=0.05)
    if stage in ("dpo", "kto"):
        assert result["eval_loss"] == pytest.approx(looks[best]["test_loss"], rel=1e-4)
    other = copy_of(small, tmp_path / "last", stage, **{stage: {"keep": "last"}})
    work(other, stage)
    assert metrics(other, stage)["kept_step"] == last
    assert metrics(other, stage)["overfits_from"] == result["overfits_from"]
    assert files(other / f"models/{stage}") != files(root / f"models/{stage}")


@pytest.mark.integration
def test_a_killed_and_stopped_run_keeps_the_same_bits(small: Path, tmp_path: Path) -> None:
    undisturbed = copy_of(small, tmp_path / "whole", "reward")
    work(undisturbed, "reward")
    kept = metrics(undisturbed, "reward")["kept_step"]
    root = copy_of(small, tmp_path / "killed", "reward")
    killed_stopped_and_resumed(root, "reward", kill_at=kept + 1, stop_at=kept + 7)
    assert files(root / "models/reward") == files(undisturbed / "models/reward")
    assert metrics(root, "reward") == metrics(undisturbed, "reward")
    assert not list((root / "checkpoints/reward").glob("*/*"))


@pytest.mark.integration
@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_two_processes_keep_the_same_checkpoint(sharding: str, small: Path, tmp_path: Path) -> None:
    few = {"sft": {"epochs": 4.0, "learning_rate": 4.0e-3}}
    alone = copy_of(small, tmp_path / "one", "sft", **few)
    work(alone, "sft")
    where = params().where.model_dump() | {"sft": {"sharding": sharding}}
    two = copy_of(small, tmp_path / "two", "sft", where=where, **few)
    process = start(two, "sft", processes=2)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    result, expected = metrics(two, "sft"), metrics(alone, "sft")
    assert result["kept_step"] == expected["kept_step"]
    assert result["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)
    looks = [
        {row.step: row.values["test_loss"] for row in metric_rows(at, "sft") if "test_loss" in row.values}
        for at in (two, alone)
    ]
    assert looks[0] == pytest.approx(looks[1], rel=1e-3)


def test_best_without_validation_rows_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"reward.keep=best .* data.validation_fraction=0"):
        params(reward={"keep": "best"})
    with pytest.raises(ParamsError, match="leave no prompts to train on"):
        params(data={"validation_fraction": 0.8})


def test_a_loss_is_worse_only_if_it_surely_is() -> None:
    rng = np.random.default_rng(1)
    best = RowLosses(rng.uniform(1, 3, 50), np.ones(50))
    noisy = best._replace(sums=best.sums + rng.normal(0.02, 0.5, 50))
    assert not is_worse(noisy, best)
    assert is_worse(best._replace(sums=best.sums + rng.normal(0.2, 0.2, 50)), best)
    assert not is_worse(best, best)
    first = RowLosses(np.array([1.0]), np.array([1.0]))
    assert not is_worse(first._replace(sums=np.array([9.0])), first)


def test_the_temperature_is_the_one_that_the_margins_were_multiplied_by() -> None:
    rng = np.random.default_rng(2)
    margins = rng.normal(0.5, 1.5, 20_000)
    chosen = rng.uniform(size=len(margins)) < 1 / (1 + np.exp(-margins))
    true = np.where(chosen, margins, -margins)
    assert fitted_temperature(true) == pytest.approx(1.0, abs=0.1)
    assert fitted_temperature(3 * true) == pytest.approx(3.0, abs=0.3)
    assert pair_losses(np.zeros(2)).mean == pytest.approx(np.log(2))
