"""What makes a plan a guess is said before its figures."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from config.workspace.machine import MACHINE_FILE
from tests.conftest import ROOT
from tests.costs.machines import machine


def warned(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["plan", "--json", *arguments], catch_exceptions=False)
    assert json.loads(done.stdout)
    return done.stderr.splitlines()


def test_data_that_is_not_there_and_rates_that_are_not_measured_are_named(project: Path) -> None:
    assert warned() == ["The pace of this machine is not measured: rlhf calibrate does that in two minutes."]
    mine = project / "mine.yaml"
    mine.write_text(
        f"extends: {ROOT / 'recipes' / 'demo.yaml'}\n"
        "data:\n  source: {kind: file, path: absent.jsonl, format: pairs, columns: {}}\n"
    )
    result = warned("--recipe", "mine.yaml", "--hardware", "a100-80")
    assert result == [
        "data.source.path=absent.jsonl does not exist: its rows are assumed. Put the file there, or fix the path."
    ]
    (project / "absent.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert warned("--recipe", "mine.yaml", "--hardware", "a100-80") == []


def test_a_measured_machine_is_not_warned_of(project: Path) -> None:
    (project / MACHINE_FILE).parent.mkdir()
    result = machine()
    judge = result.stages[1].model_copy(update={"parameters": 430_896.0})  # without an output head
    stages = (result.stages[0], judge, *result.stages[2:])
    write = (project / MACHINE_FILE).write_text
    write(yaml.safe_dump(machine(stages=stages).model_dump(mode="json")))
    assert warned() == []
    write(yaml.safe_dump(machine(stages=stages[:3]).model_dump(mode="json")))
    assert warned() == [
        "evaluate: not timed here with this model. rlhf calibrate, with the same --recipe and --set, does that."
    ]
    assert warned("--hardware", "a100-80") == []


@pytest.mark.usefixtures("project")
def test_a_comparison_says_once_that_rates_are_not_measured() -> None:
    words = ["plan", "compare", str(ROOT / "recipes" / "demo.yaml"), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.stderr.count("rlhf calibrate does that") == 1


@pytest.mark.parametrize(
    ("usd", "said"),
    [
        (32.77, "If that is an instance's price, divide it by its devices."),
        (0.7, "A spot instance may end at any time"),
        (2.5, None),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_price_far_from_the_catalogues_is_doubted(usd: float, said: str | None) -> None:
    result = warned("--hardware", "h100", "--usd-per-gpu-hour", str(usd))
    if said is None:
        assert result == []
    else:
        (line,) = result
        assert line.startswith(f"{usd} USD per device-hour: h100-sxm is offered for 1.99 to 5 USD")
        assert said in line
