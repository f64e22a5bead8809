"""The summary of a run and its key picture."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from config.load import load
from config.schema import Params
from reporting.build import build_summary
from reporting.inputs import read_findings
from reporting.key_picture import PANEL, key_picture
from reporting.summary import summary
from tests.conftest import ROOT
from tests.reporting.plausible_run import write_cached_run, write_pipeline_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def params() -> Params:
    return load(ROOT / "recipes" / "demo.yaml")


def panels(picture: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{SVG}g")


def texts(element: ElementTree.Element) -> list[str]:
    return [text for text in element.itertext() if text.strip()]


def bar(panel: ElementTree.Element) -> list[float]:
    """Widths of the cuts of a panel's bar."""
    return [float(rect.attrib["width"]) for rect in panel.iter(f"{SVG}rect") if rect.get("height") == "18"]


def test_the_picture_is_in_proportion(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    findings = read_findings(tmp_path, params)
    stages, brought, phases = panels(key_picture(findings))
    whole = findings.ledger.total_seconds
    assert bar(stages) == pytest.approx(
        [PANEL * stage.seconds / whole - 1 for stage in findings.ledger.stages], abs=0.01
    )
    assert {"rollout", "update", "2 others"} <= set(texts(phases))
    assert sum(bar(phases)) + len(bar(phases)) == pytest.approx(PANEL, abs=0.1)
    assert {"gold, aligned", "0.884", "wins, gold", "87.3%"} <= set(texts(brought))


def test_a_run_that_reused_everything_and_one_that_was_not_evaluated_say_so(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    write_cached_run(tmp_path)
    (tmp_path / "metrics" / "evaluate.json").unlink()
    shown = [texts(panel) for panel in panels(key_picture(read_findings(tmp_path, params)))]
    assert "nothing was done: all outputs were reused" in shown[0]
    assert "not evaluated" in shown[1]


def test_a_stage_that_was_not_done_says_so(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    write_cached_run(tmp_path)
    shown = summary(read_findings(tmp_path, params))
    assert "| ppo (cached) | 0 s | $0 |" in shown
    assert "| total | 0 s | $0 |" in shown


def test_both_files_are_kept_with_the_run(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path, "r1")
    build_summary(tmp_path, params, "r1")
    folder = tmp_path / "runs" / "pipeline" / "r1"
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "summary.md").read_text(encoding="utf-8"))
    assert len(panels((folder / picture).read_text(encoding="utf-8"))) == 3
