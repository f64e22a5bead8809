"""`rlhf calibrate`: what it prints of a measurement."""

import json
from pathlib import Path

import pytest
import yaml

from cli.commands.calibrate import show
from config.workspace.machine import MACHINE_FILE
from tests.costs.machines import machine, timed

pytestmark = pytest.mark.usefixtures("quick_stages")


ROWS = [timed("ppo", "start", units=1.0, seconds=2.5), timed("ppo", "update")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / MACHINE_FILE).parent.mkdir()
    (tmp_path / MACHINE_FILE).write_text(yaml.safe_dump(machine().model_dump(mode="json")))
    return tmp_path


def test_json_is_the_whole_record_and_where_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(project, ROWS, as_json=True)
    content = json.loads(capsys.readouterr().out)
    assert content["stages"][0] == ROWS[0].model_dump(mode="json")
    assert content["file"] == str(MACHINE_FILE)


def test_people_see_rates_in_their_units_and_each_stage_that_was_timed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(project, ROWS, as_json=False)
    said = capsys.readouterr().out
    assert "100 GFLOP/s" in said
    assert "10.0 GB/s" in said
    assert "ppo         start 2.5 s, update 1e+04" in said
    assert max(map(len, said.splitlines()[1:])) <= 80
