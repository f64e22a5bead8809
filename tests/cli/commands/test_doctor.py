import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import doctor
from cli.commands.doctor import Finding
from tests.conftest import ROOT
from tests.support.stage_project import make_project


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = make_project(tmp_path / "project", tmp_path / "remote", ["sft"])
    (root / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    return root


def test_a_sound_project_has_no_problem(project: Path) -> None:
    checks: list[Callable[[Path], list[Finding]]] = [
        doctor.versions,
        doctor.disk,
        doctor.permission,
        doctor.tools,
        doctor.params_and_data,
    ]
    assert [finding for check in checks for finding in check(project) if finding.level == "problem"] == []


def test_other_versions_are_a_notice_with_the_command_that_mends_them(project: Path) -> None:
    (project / "constraints.txt").write_text("pydantic==1.0\npyyaml==6.0.3\n")
    (finding,) = doctor.versions(project)
    assert finding.level == "notice"
    assert "pydantic" in finding.text
    assert "pip install -c constraints.txt" in finding.fix


def test_a_full_disk_is_a_problem(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FREE_BYTES_NEEDED", 2**80)
    assert levels(doctor.disk(project)) == [("disk", "problem")]


def test_a_folder_without_git_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    assert ("git", "notice") in levels(doctor.tools(tmp_path))


def test_a_pipeline_that_dvc_cannot_read_is_a_problem(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: [")
    assert ("dvc", "problem") in levels(doctor.tools(project))


def test_a_taken_port_is_a_notice_with_another_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        busy_port = other.getsockname()[1]
        monkeypatch.setattr(doctor, "DEFAULT_PORTS", {"prefect": busy_port})
        (finding,) = doctor.ports(project)
    assert finding.level == "notice"
    assert finding.fix == f"rlhf up --prefect-port {busy_port + 1}"


@pytest.mark.parametrize(("content", "level"), [(None, "problem"), (b"", "problem"), (b"[]", "ok")])
def test_data_files_are_looked_for(project: Path, content: bytes | None, level: str) -> None:
    text = (project / "params.yaml").read_text()
    head, tail = text.split("  source:\n", 1)
    rest = tail[tail.index("  sft_source:") :]
    (project / "params.yaml").write_text(
        f"{head}  source:\n    kind: file\n    path: votes.json\n    format: votes\n    columns: {{}}\n{rest}"
    )
    if content is not None:
        (project / "votes.json").write_bytes(content)
    assert levels(doctor.params_and_data(project)) == [("params", "ok"), ("data", level)]


def test_broken_params_are_a_problem(project: Path) -> None:
    (project / "params.yaml").write_text("seed: 1\n")
    assert levels(doctor.params_and_data(project)) == [("params", "problem")]


def test_a_fix_is_printed_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    result = [Finding("disk", "problem", "full", "free some"), Finding("git", "ok", "2.40")]
    monkeypatch.chdir(project)
    monkeypatch.setattr(doctor, "CHECKS", [lambda root: result])
    assert doctor.examine(as_json=False) == 2
    assert capsys.readouterr().out.splitlines() == [
        "problem  disk        full -> free some",
        "ok       git         2.40",
    ]
