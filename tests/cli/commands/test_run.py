"""What `rlhf run` prints at its end."""

import errno
from pathlib import Path

import pytest
from prefect.states import Failed

from cli.commands.run import result, show
from cli.flow_run import reason
from config.errors import EnvironmentFault
from config.load import load, write
from config.records import kept_folder
from tests.conftest import ROOT
from tests.reporting.plausible_run import write_pipeline_run

RUN = "20261121-120000-a1b2"


def test_only_the_runs_own_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = load(ROOT / "recipes" / "demo.yaml")
    write(params, tmp_path / "params.yaml")
    write_pipeline_run(tmp_path, RUN)
    report, kept = (place / "report" / "report.html" for place in (tmp_path, kept_folder(tmp_path, RUN)))
    for path in (report, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    report.write_text("of an earlier run")
    assert result(tmp_path, params)["report"] is None
    show(tmp_path, params)
    assert str(report) not in capsys.readouterr().out
    kept.write_text("of this one")
    assert result(tmp_path, params)["report"] == str(report)
    show(tmp_path, params)
    assert str(report) in capsys.readouterr().out


def test_a_full_disk_under_the_pipeline_itself_is_named_and_anything_else_in_a_line() -> None:
    full = Failed(data=OSError(errno.ENOSPC, "No space left on device", "runs/pipeline.jsonl"))
    said = reason(full)
    assert isinstance(said, EnvironmentFault)
    assert str(said).startswith("runs/pipeline.jsonl: no space left on the disk. Free some")
    other = reason(Failed(message="OSError: broken", data=OSError(errno.EIO, "broken")))
    assert str(other).startswith("the run failed: OSError: broken. What the stages printed is in")
