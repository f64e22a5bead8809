"""What a command of this process came to is its exit code: 0 done, 75 stopped, 76 over budget, 2 a problem."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed
from typer.testing import CliRunner

import cli.commands.run
import cli.flow_run
import flows.retrain
from cli.commands import doctor, retrain
from cli.main import app
from config import jsonl
from config.workspace.champions import Champion, ChampionRecord, Event, write_record
from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, RetrainRow
from tests.reporting.plausible_run import write_pipeline_run

ENDS = [
    (Completed(), 0),
    (Cancelled(name="Stopped", message="asked to stop"), 75),
    (Cancelled(name="OverBudget", message="asked to stop"), 76),
]


@pytest.mark.parametrize(("state", "code"), ENDS)
def test_of_a_run(project: Path, monkeypatch: pytest.MonkeyPatch, state: State[Any], code: int) -> None:
    write_pipeline_run(project)
    given = []

    def run_flow(root: Path, params: Any, yes: bool, start: Any, recipe: Path | None) -> State[Any]:
        given.append((root, params.seed, yes, recipe))
        return state

    monkeypatch.setattr(cli.commands.run, "run_flow", run_flow)
    done = CliRunner().invoke(app, ["run", "--yes", "--json", "--set", "seed=77"])
    assert done.exit_code == code
    assert given == [(project, 77, True, None)]
    assert ("asked to stop" in done.stderr) is (code > 0)


@pytest.mark.parametrize(("state", "code"), ENDS)
@pytest.mark.parametrize("force", [True, False])
def test_of_a_retrain_cycle_which_is_told_whether_to_train_anyway(
    project: Path, monkeypatch: pytest.MonkeyPatch, state: State[Any], code: int, force: bool
) -> None:
    for cycle, event, fields in (
        ("c1", "end", {"outcome": "promoted", "said": "old"}),
        ("c2", "begin", {}),
        ("c2", "cost", {"usd": 0.25}),
        ("c2", "end", {"outcome": "kept", "said": "it stays", "detail": {"usd": 0.5}}),
    ):
        row = RetrainRow.model_validate({"time": 1.0, "cycle": cycle, "event": event, **fields})
        jsonl.append(project / RETRAIN_ROWS, row)
    (project / RETRAIN_FOLDER / "c2").mkdir(parents=True)
    (project / RETRAIN_FOLDER / "c2" / "contest.json").write_text('{"prompts": 9}')
    champions = tuple(
        Champion(run_id=run, method="ppo", model_digest="m", data_version="d", data_key="k") for run in ("r1", "r2")
    )
    event = Event(time=1.0, event="promoted", champion="r2", before="r1", by="test", why="test")
    write_record(project, ChampionRecord(lineage=champions, events=(event,)))
    forced = []

    def flow(params: Any, force: bool, return_state: bool) -> State[Any]:
        forced.append((params.seed, force, return_state))
        return state

    def run_flow(root: Path, params: Any, yes: bool, start: Any, retrain: bool) -> State[Any]:
        assert retrain
        return start()

    monkeypatch.setattr(flows.retrain, "retrain", flow)
    monkeypatch.setattr(cli.flow_run, "run_flow", run_flow)
    typed = ["retrain", "--json", "--set", "seed=77", *(["--force"] if force else [])]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == code
    assert forced == [(77, force, True)]
    assert json.loads(done.stdout) == {
        "cycle": "c2",
        "outcome": "kept",
        "said": "it stays",
        "run_id": None,
        "usd": 0.5,
        "champion": "r2",
        "examination": None,
        "contest": {"prompts": 9},
        "page": str(project / RETRAIN_FOLDER / "c2" / "cycle.md"),
    }


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("notice", 0), ("problem", 2)])
def test_of_the_doctor(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: Any, code: int
) -> None:
    result = doctor.Finding("disk", level, "3 GiB free", "free some space")
    monkeypatch.setattr(doctor, "CHECKS", (lambda root: [result], lambda root: []))
    assert doctor.examine(as_json=True) == code
    assert json.loads(capsys.readouterr().out) == [result._asdict()]
    assert doctor.examine(as_json=False) == code


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("yes\n", True), ("n\n", False)])
def test_a_question_is_answered_with_yes_alone(monkeypatch: pytest.MonkeyPatch, answer: str, goes: bool) -> None:
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

        @staticmethod
        def readline() -> str:
            return answer

    monkeypatch.setattr(retrain.sys, "stdin", Terminal)
    if goes:
        retrain._confirm("Go?", yes=False)
    else:
        with pytest.raises(retrain.UserError, match="not confirmed"):
            retrain._confirm("Go?", yes=False)
