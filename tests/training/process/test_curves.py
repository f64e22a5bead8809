import csv
from collections.abc import Callable
from pathlib import Path

from tests.training.support.tiny import open_stage
from training.process.curves import write_curves
from training.process.stage import Stage


def table(root: Path) -> list[list[str]]:
    with (root / "plots/x.csv").open(newline="") as file:
        return list(csv.reader(file))


def attempt(root: Path, fingerprint: str, rows: dict[int, dict[str, float]]) -> Stage:
    stage, _ = open_stage(root, "ppo")
    stage.fingerprint = fingerprint
    stage.mark("start")
    for step, values in rows.items():
        stage.log(step, values)
    return stage


def test_steps_that_were_repeated_after_a_kill_count_once_as_they_were_at_last(project: Callable[..., Path]) -> None:
    root = project("ppo")
    attempt(root, "of other settings", {1: {"loss": 99.0}, 7: {"loss": 99.0}})
    attempt(root, "f", {1: {"loss": 3.0, "kl": 0.1}, 2: {"loss": 2.0}, 3: {"loss": 1.5}})
    stage = attempt(root, "f", {3: {"loss": 1.0, "kl": 0.3}, 4: {"other": 5.0, "kl": 0.2}, 5: {"loss": 0.5}})
    values = write_curves(stage, "plots/x.csv", ("loss", "kl"))
    assert table(root) == [
        ["step", "loss", "kl"],
        ["1", "3.0", "0.1"],
        ["2", "2.0", ""],
        ["3", "1.0", "0.3"],
        ["5", "0.5", ""],
    ]
    assert [row["loss"] for row in values] == [3.0, 2.0, 1.0, 0.5]


def test_a_stage_that_logged_nothing_has_an_empty_curve(project: Callable[..., Path]) -> None:
    root = project("ppo")
    assert write_curves(attempt(root, "f", {}), "plots/x.csv", ("loss",)) == []
    assert table(root) == [["step", "loss"]]
