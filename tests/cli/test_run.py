"""What `rlhf run` prints at its end."""

from pathlib import Path

import pytest

from cli.run import result, show
from config.load import load, write
from config.records import kept_folder
from tests.conftest import ROOT
from tests.reporting.plausible_run import write_pipeline_run

RUN = "20261121-120000-a1b2"


def test_only_the_runs_own_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = load(ROOT / "recipes" / "demo.yaml")
    write(params, tmp_path / "params.yaml")
    write_pipeline_run(tmp_path, RUN)
    report, kept = (
        place / "report" / "report.html" for place in (tmp_path, kept_folder(tmp_path, RUN))
    )
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
