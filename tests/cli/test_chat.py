"""`rlhf chat`: which folder and models it starts, and which runs it refuses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from config import jsonl
from config.errors import UserError
from config.load import load, write
from config.records import PipelineRow, kept_folder
from config.workspace.champions import Champion, ChampionRecord, champion_folder, write_record


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
    found: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def ran(project: Path, run_id: str, digest: str) -> None:
    """A run that made models/ppo of this digest, and kept its params."""
    row = PipelineRow(
        time=1.0, run_id=run_id, event="stage", stage="ppo", detail={"outs": {"models/ppo": digest}}
    )
    jsonl.append(project / "runs" / "pipeline.jsonl", row)
    kept_folder(project, run_id).mkdir(parents=True)
    write(load(project / "params.yaml"), kept_folder(project, run_id) / "params.yaml")


def lock(project: Path, digest: str) -> None:
    outs = [{"path": "models/ppo", "md5": digest}]
    (project / "dvc.lock").write_text(yaml.safe_dump({"stages": {"align@ppo": {"outs": outs}}}))


def test_without_a_run_it_is_what_is_in_place_as_evaluation_samples(
    project: Path, started: list[list[str]]
) -> None:
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
    found = options(started[0])
    assert found["--models"] == ["base", "sft", "aligned"]
    assert [found[f"--{name}"] for name in ("temperature", "max-new-tokens", "seed")] == [
        ["0.0"],
        ["5"],
        ["9"],
    ]


def test_a_run_is_talked_to_where_its_model_is_in_place(
    project: Path, started: list[list[str]]
) -> None:
    ran(project, "first", "aaa")
    ran(project, "second", "bbb")
    lock(project, "bbb")
    call("last")
    assert options(started[0])["--folder"] == [str(project)]
    with pytest.raises(UserError, match=r"not those of first\. .*restore first"):
        call("first")
    (project / "dvc.lock").unlink()
    with pytest.raises(UserError, match="not those of second"):
        call("second")


def test_the_champion_is_talked_to_in_its_folder(project: Path, started: list[list[str]]) -> None:
    with pytest.raises(UserError, match="there is no champion yet"):
        call("champion")
    champion = Champion(
        run_id="best", method="ppo", model_digest="d", data_version="v", data_key="k"
    )
    write_record(project, ChampionRecord(lineage=(champion,)))
    call("champion")
    assert options(started[0])["--folder"] == [str(champion_folder(project, "best"))]
