"""What makes a plan a guess is said before its figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config import jsonl
from config.workspace.timed import TIMED_FILE
from tests.conftest import ROOT
from tests.costs.machines import timed


def warned(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["plan", "--json", *arguments], catch_exceptions=False)
    assert json.loads(done.stdout)
    return done.stderr.splitlines()


def test_data_that_is_not_there_and_rates_that_are_not_measured_are_named(project: Path) -> None:
    (line,) = warned()
    assert line.startswith(
        "sft, reward, ppo, evaluate: never ran here with this model and these levers. rlhf calibrate"
    )
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


def test_stages_that_were_timed_here_are_not_warned_of(project: Path) -> None:
    for stage in ("sft", "reward", "ppo"):
        jsonl.append(project / TIMED_FILE, timed(stage, "start", hardware="cpu"))
    (line,) = warned()
    assert line.startswith("evaluate: never ran here")
    jsonl.append(project / TIMED_FILE, timed("evaluate", "start", hardware="cpu", run_id="r"))
    assert warned() == []
    assert warned("--hardware", "a100-80") == []


@pytest.mark.usefixtures("project")
def test_a_comparison_says_once_that_rates_are_not_measured() -> None:
    words = ["plan", "compare", str(ROOT / "recipes" / "demo.yaml"), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.stderr.count("never ran here") == 1


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
