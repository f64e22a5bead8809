"""Outputs that are in the remote alone: what counts as unchanged, and how they come back."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.errors import EnvironmentFault
from config.load import load
from config.student import OUTS
from tasks.dvc import transfers
from tasks.dvc.light_stages import record_no_student
from tasks.dvc.pull import inputs_of, remote_of, small_outputs
from tasks.dvc.reuse import reusable
from tasks.dvc.status import environment, is_unchanged, remove_from_lock
from tasks.dvc.transfers import fetch, public, push, transfer
from tests.conftest import ROOT
from tests.support.stage_project import copy_of, make_project, stale_stages

pytestmark = pytest.mark.integration

PIPELINE = {
    "data": {
        "cmd": "mkdir -p data/prepared/sft data/prepared/pairs && cp sft.txt data/prepared/sft/ && "
        "cp pairs.txt data/prepared/pairs/",
        "deps": ["sft.txt", "pairs.txt"],
        "outs": [{"data/prepared": {"persist": True}}],
    },
    "sft": {
        "cmd": "mkdir -p models metrics && cat data/prepared/sft/sft.txt > models/sft && printf "
        '\'{"rows": %d, "rate": 1e-05, "refused": %d}\' $(wc -l < models/sft) '
        "$(wc -l < refused.txt) > metrics/sft.json",
        "deps": ["data/prepared/sft", "refused.txt"],
        "outs": ["models/sft"],
        "metrics": ["metrics/sft.json"],
    },
    "reward": {
        "cmd": "cp models/sft models/reward",
        "deps": ["models/sft"],
        "params": [{"metrics/sft.json": ["rows", "rate"]}],
        "outs": ["models/reward"],
    },
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project and its remote with the stages data, sft and reward, done and pushed."""
    folder = tmp_path_factory.mktemp("done")
    root = make_project(folder / "project", folder / "remote", ["sft"])
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": PIPELINE}))
    (root / "sft.txt").write_text("one\n")
    (root / "pairs.txt").write_text("a b\n")
    (root / "refused.txt").write_text("")
    repro(root, "data", "sft", "reward")
    assert push(root) is None
    return folder


@pytest.fixture
def project(done: Path, tmp_path: Path) -> Path:
    """A copy of it, with a remote of its own."""
    return copy_of(done, tmp_path)


def repro(root: Path, *stages: str) -> None:
    for stage in stages:
        subprocess.run(
            [sys.executable, "-m", "dvc", "repro", "--single-item", stage],
            cwd=root,
            env=environment(),
            check=True,
            capture_output=True,
        )


def is_unchanged_elsewhere(root: Path, stage: str) -> bool:
    return stage in reusable(root, load(root / "params.yaml"), [stage])


def leave_only_the_lock(root: Path) -> None:
    """As a pipeline whose stages are all placed elsewhere has it: neither outputs nor a cache."""
    for name in ("data/prepared", "models", "metrics", ".dvc/cache"):
        shutil.rmtree(root / name, ignore_errors=True)


def test_a_stage_reads_outputs_or_parts_of_them(project: Path) -> None:
    assert inputs_of(project, "data") == []
    assert inputs_of(project, "sft") == ["data/prepared/sft"]
    assert (small_outputs(project, "sft"), small_outputs(project, "reward")) == (["metrics/sft.json"], [])


def test_outputs_that_are_in_the_remote_alone_are_unchanged(project: Path) -> None:
    leave_only_the_lock(project)
    assert [is_unchanged_elsewhere(project, stage) for stage in ("data", "sft", "reward")] == [True] * 3
    assert not is_unchanged(project, "sft")


def test_a_metric_that_a_stage_reads_counts_by_its_value_wherever_it_is(project: Path) -> None:
    (project / "refused.txt").write_text("one\n")
    done_elsewhere(project, "sft")
    assert is_unchanged_elsewhere(project, "reward"), "another metric than those that it reads"
    leave_only_the_lock(project)
    assert is_unchanged_elsewhere(project, "reward"), "from the remote"
    (project / "metrics").mkdir(exist_ok=True)
    (project / "metrics" / "sft.json").write_text('{"rows": 7, "rate": 1e-05}')
    assert is_unchanged_elsewhere(project, "reward"), "a copy here is no metric of the stage"


def test_that_there_is_no_student_is_recorded_and_pushed_where_outputs_are_in_the_remote_alone(project: Path) -> None:
    lock = (project / "dvc.lock").read_text()
    pipeline = {**PIPELINE, "distill": {
        "cmd": "echo", "deps": ["models/sft", "data/prepared/sft/sft.txt", "sft.txt"], "params": ["distill"],
        "outs": [{out: {"persist": True}} for out in OUTS],
    }}  # fmt: skip
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": pipeline}))
    leave_only_the_lock(project)
    record_no_student(project)
    assert (project / "dvc.lock").read_text().startswith(lock[:20])
    assert push(project) is None
    shutil.rmtree(project / "models")
    leave_only_the_lock(project)
    fetch(project, ["models/distill"])
    assert (project / "models/distill/none.json").is_file()
    assert is_unchanged_elsewhere(project, "distill")


def test_a_stage_that_was_never_done_is_to_be_done_whatever_it_reads(project: Path) -> None:
    for stage in ("reward", "sft", "data"):
        remove_from_lock(project, stage)
        assert not is_unchanged_elsewhere(project, stage)


def test_fetching_brings_what_is_missing_and_only_that(project: Path) -> None:
    leave_only_the_lock(project)
    fetch(project, ["data/prepared/sft", "models/sft"])
    assert (project / "data/prepared/sft/sft.txt").read_text() == (project / "models/sft").read_text() == "one\n"
    assert not (project / "data/prepared/pairs").exists()


def test_a_changed_part_of_a_folder_makes_only_its_reader_stale(project: Path) -> None:
    (project / "pairs.txt").write_text("c d\n")
    repro(project, "data")
    assert push(project) is None
    leave_only_the_lock(project)
    assert is_unchanged_elsewhere(project, "sft")
    fetch(project, ["data/prepared"])
    (project / "sft.txt").write_text("two\n")
    repro(project, "data")
    assert push(project) is None
    leave_only_the_lock(project)
    assert not is_unchanged_elsewhere(project, "sft")
    assert is_unchanged_elsewhere(project, "reward"), "models/sft is still what reward read"


def test_changed_code_or_inputs_are_not_taken_for_absent(project: Path) -> None:
    leave_only_the_lock(project)
    (project / "sft.txt").write_text("two\n")
    assert not is_unchanged_elsewhere(project, "data")


def test_what_the_remote_does_not_have_is_one_line(project: Path, tmp_path: Path) -> None:
    leave_only_the_lock(project)
    shutil.rmtree(tmp_path / "remote")
    with pytest.raises(EnvironmentFault, match="models/sft could not be fetched from the DVC remote") as fault:
        fetch(project, ["models/sft"])
    assert "\n" not in str(fault.value)
    assert str(fault.value).endswith("does not have models/sft."), "which of several it was"


def test_what_is_taken_away_for_a_moment_is_asked_for_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another container that writes to the cache that both use."""
    leave_only_the_lock(project)
    met: list[list[Exception]] = []

    def racing(root: Path, action: Callable[[Any], object]) -> list[Exception]:
        away = None if met else shutil.move(root.parent / "remote", root.parent / "away")
        met.append(transfer(root, action))
        if away:
            shutil.move(away, root.parent / "remote")
        return met[-1]

    monkeypatch.setattr(transfers, "transfer", racing)
    fetch(project, ["models/sft"])
    assert (project / "models/sft").read_text() == "one\n"
    assert [bool(errors) for errors in met] == [True, False]


def test_only_public_settings_of_the_remote_are_reported(project: Path, tmp_path: Path) -> None:
    assert remote_of(project) == {"name": "local", "url": str(tmp_path / "remote")}
    with (project / ".dvc" / "config.local").open("a") as file:
        file.write("    endpointurl = http://store:9000\n    access_key_id = who\n    secret_access_key = hidden\n")
    (project / ".dvc" / "config.local").write_text(
        (project / ".dvc" / "config.local").read_text().replace(str(tmp_path / "remote"), "s3://bucket/dvc")
    )
    assert remote_of(project) == {"name": "local", "url": "s3://bucket/dvc", "endpointurl": "http://store:9000"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "gs://bucket/dvc",
            "the DVC remote gs://bucket/dvc cannot be reached from there: only s3:// and a shared folder can",
        ),
        ("ssh://me:hidden@host/dvc", "the address of the DVC remote on host holds a user or a password"),
        ("s3://key:hidden@bucket/dvc", "the address of the DVC remote on bucket holds a user or a password"),
    ],
)
def test_a_remote_that_containers_cannot_or_should_not_be_given_is_one_line(
    project: Path, url: str, words: str
) -> None:
    (project / ".dvc" / "config.local").write_text(f"['remote \"local\"']\n    url = {url}\n")
    with pytest.raises(EnvironmentFault) as fault:
        remote_of(project)
    assert words in str(fault.value)
    assert "hidden" not in str(fault.value)
    assert "\n" not in str(fault.value)
    assert "hidden" not in str(public(url))


def test_an_address_is_shown_without_who_asks() -> None:
    assert [
        public(url) for url in ("ssh://me:x@host/a@b", "ssh://me:p@ss@host/a", "s3://bucket/a@b", "/disk", None)
    ] == ["ssh://***@host/a@b", "ssh://***@host/a", "s3://bucket/a@b", "/disk", None]


def done_elsewhere(root: Path, *stages: str) -> None:
    """Stages are done again in another place with the same remote; here only dvc.lock changes, as after a placed
    stage.
    """
    elsewhere = root.with_name("elsewhere")
    shutil.copytree(root, elsewhere)
    repro(elsewhere, *stages)
    assert push(elsewhere) is None
    shutil.copyfile(elsewhere / "dvc.lock", root / "dvc.lock")
    shutil.rmtree(elsewhere)


def test_files_of_an_earlier_run_give_way_to_what_dvc_lock_has(project: Path) -> None:
    (project / "sft.txt").write_text("one\ntwo\n")
    done_elsewhere(project, "data", "sft")
    (project / "data/prepared/sft/left-over.txt").write_text("of an earlier run")
    wanted = ["models/sft", "metrics/sft.json", "data/prepared/sft"]
    fetch(project, wanted)
    assert (project / "models/sft").read_text() == (project / "data/prepared/sft/sft.txt").read_text() == "one\ntwo\n"
    assert json.loads((project / "metrics/sft.json").read_text())["rows"] == 2
    assert not (project / "data/prepared/sft/left-over.txt").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "transfer", lambda *_: pytest.fail("what is as dvc.lock has it was fetched"))
        fetch(project, wanted)


def test_stale_files_here_neither_hide_a_change_nor_make_one(project: Path) -> None:
    (project / "sft.txt").write_text("one\ntwo\n")
    done_elsewhere(project, "data", "sft")
    assert is_unchanged(project, "reward"), "DVC compares with the old models/sft on the disk"
    assert not is_unchanged_elsewhere(project, "reward"), "dvc.lock has another models/sft than reward read"
    assert is_unchanged_elsewhere(project, "sft"), "the old models/sft on the disk is a copy"
    params = load(ROOT / "recipes" / "demo.yaml", ["where.sft.pool=gpus"])
    assert stale_stages(project, params, ["data", "sft", "reward"]) == ["reward"]
    fetch(project, ["models/sft", "metrics/sft.json"])
    done_elsewhere(project, "reward")
    assert is_unchanged_elsewhere(project, "reward")
