"""`rlhf chat`: which folder and models it starts, and which runs it refuses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.errors import UserError
from config.load import load


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the processes that were started."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def call(*arguments: str) -> int:
    return CliRunner().invoke(app, ["chat", *arguments], catch_exceptions=False).exit_code


def options(command: list[str]) -> dict[str, list[str]]:
    assert command[:3] == [sys.executable, "-m", "training.inference.chat"]
    result: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            result[word] = []
        else:
            result[list(result)[-1]].append(word)
    return result


def test_without_a_run_it_is_what_is_in_place_as_evaluation_samples(project: Path, started: list[list[str]]) -> None:
    assert call() == 3
    evaluate = load(project / "params.yaml").evaluate
    assert options(started[0]) == {
        "--folder": [str(project)],
        "--models": ["aligned"],
        "--seed": ["0"],
        "--temperature": [str(evaluate.temperature)],
        "--max-new-tokens": [str(evaluate.max_new_tokens)],
    }


def test_every_option_arrives(project: Path, started: list[list[str]]) -> None:
    call("--compare", "--temperature", "0", "--max-new-tokens", "5", "--seed", "9")
    result = options(started[0])
    assert result["--models"] == ["base", "sft", "aligned"]
    assert [result[f"--{name}"] for name in ("temperature", "max-new-tokens", "seed")] == [["0.0"], ["5"], ["9"]]


def test_the_champion_needs_to_be_there(project: Path, started: list[list[str]]) -> None:
    with pytest.raises(UserError, match="there is no champion yet"):
        call("champion")
    assert started == []
