"""`rlhf calibrate`: what it prints of a measurement, and that a failed one leaves the last in
place.
"""

import json
from pathlib import Path

import pytest
import yaml

from cli.commands.calibrate import calibrate, show
from config.errors import EnvironmentFault
from config.workspace.machine import MACHINE_FILE
from tests.costs.machines import machine

pytestmark = pytest.mark.usefixtures("quick_stages")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / MACHINE_FILE).parent.mkdir()
    (tmp_path / MACHINE_FILE).write_text(yaml.safe_dump(machine().model_dump(mode="json")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_is_the_whole_record_and_where_it_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(project, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["decode_step_seconds"] == 1e-3
    assert found["file"] == str(MACHINE_FILE)


def test_people_see_rates_in_their_units(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(project, as_json=False)
    said = capsys.readouterr().out
    assert "100 GFLOP/s" in said
    assert "10.0 GB/s" in said


def test_a_measurement_that_fails_leaves_the_last_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (project / MACHINE_FILE).read_text()
    # a package of that name in the folder hides ours from `python -m`
    (project / "training" / "calibrate").mkdir(parents=True)
    for package in ("training", "training/calibrate"):
        (project / package / "__init__.py").write_text("")
    (project / "training" / "calibrate" / "machine.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(EnvironmentFault, match="exit code 3"):
        calibrate(as_json=False)
    assert (project / MACHINE_FILE).read_text() == before


def test_a_trainers_start_and_the_loops_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = machine()
    stages = {
        name: made.stages[name].model_copy(update={"start_seconds": seconds})
        for name, seconds in (("sft", 6.5), ("ppo", 4.5))
    }
    (tmp_path / MACHINE_FILE).parent.mkdir()
    content = made.model_copy(update={"stages": stages}).model_dump(mode="json")
    (tmp_path / MACHINE_FILE).write_text(yaml.safe_dump(content))
    show(tmp_path, as_json=False)
    assert "6.5 s to start a Trainer's stage, 4.5 s another" in capsys.readouterr().out
