"""What a node says before it is given a stage, and what it leaves behind."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from config.errors import EnvironmentFault
from config.locks import CHECKPOINT_SECONDS
from config.workspace.at_work import locked
from tasks.cluster import node
from tasks.cluster.node import REQUEST, Node, unfit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RLHF_WORKSPACES", str(tmp_path / "workspaces"))
    monkeypatch.setattr(node, "LOWEST_FREE_BYTES", 0)
    return tmp_path / "workspaces"


def test_a_node_says_in_one_line_what_it_lacks(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.mkdir()
    assert unfit(home, str(store), {"model.path": str(tmp_path)}) == ""
    said = [unfit(home, str(store), {"model.path": "/volume/base"}), unfit(home, f"{tmp_path}/not-mounted", {})]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    said.append(unfit(home, "s3://store/dvc", {}))
    (tmp_path / "file").touch()
    said.append(unfit(tmp_path / "file" / "workspaces", str(store), {}))
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=2**30))
    monkeypatch.setattr(node, "LOWEST_FREE_BYTES", 2**31)
    said.append(unfit(home, str(store), {}))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    said.append(unfit(home, str(store), {}))
    for line, words in zip(
        said,
        ("model.path=/volume/base is not there. Mount", "the DVC remote .*not-mounted is not there",
         "s3://store/dvc cannot be reached", "cannot be written", "1.0 GiB are free at", "without a token"),
        strict=True,
    ):  # fmt: skip
        assert len(line.splitlines()) == 1
        assert re.search(words, line), (words, line)
        assert "hidden" not in line


@pytest.mark.parametrize("identity", ["../precious", "", "."])
def test_a_request_removes_and_writes_nothing_outside_of_its_own_folder(
    home: Path, tmp_path: Path, identity: str
) -> None:
    home.mkdir()
    for folder in (tmp_path / "precious", home):
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("kept")
    request = {"id": identity, "stage": "sft", "remote": {"name": "store", "url": "s3://store/dvc"}}
    with pytest.raises(EnvironmentFault, match="cannot name a folder"):
        Node().start(request, {})
    with pytest.raises(EnvironmentFault, match="outside of the project"):
        Node().start({**request, "id": "sft-1"}, {"../../outside": ""})
    assert [path.read_text() for path in tmp_path.glob("*/file")] == ["kept", "kept"]


def test_workspaces_that_a_lost_node_left_are_removed_and_no_other(home: Path) -> None:
    old = time.time() - CHECKPOINT_SECONDS - 60
    for name in ("left", "at-work", "new"):
        (home / name).mkdir(parents=True)
        (home / name / REQUEST).write_text("{}")
        if name != "new":
            os.utime(home / name / REQUEST, (old, old))
    (home / "project").mkdir()
    with locked(home / "at-work"):
        node.clear(home, CHECKPOINT_SECONDS)
        assert sorted(path.name for path in home.iterdir()) == ["at-work", "new", "project"]
        node.clear(home, 0.0)  # a container that begins
    assert sorted(path.name for path in home.iterdir()) == ["at-work", "project"]
