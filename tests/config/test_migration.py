"""Params of an earlier version: refused with what to write now, migrated to the same run, readable
where they were kept.
"""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from config.errors import ParamsError
from config.load import dump, load, read, validate
from config.migration import migrated, moved
from config.records import kept_folder
from config.workspace.kept import kept_params
from tests.conftest import ROOT

OLD = ROOT / "tests" / "config" / "fixtures" / "params-before-where.yaml"
DEMO = ROOT / "recipes" / "demo.yaml"
OF_THEN = [
    "model.random.family=llama",
    "model.random.rope_theta=10000.0",
    "data.source.preference_rows=24000",
    "data.source.prompt_rows=4000",
    "data.test_fraction=0.2",
    "sft.epochs=2.0",
    "reward.epochs=3.0",
]
"""What the demo's recipe said when OLD was written."""


def test_an_old_file_is_migrated_to_the_same_run() -> None:
    assert validate(migrated(read(OLD)), "migrated") == load(DEMO, OF_THEN)
    assert migrated(read(DEMO)) == read(DEMO)


def test_what_most_stages_say_becomes_the_default() -> None:
    old = read(OLD)
    old["processes"]["ppo"] = 2
    old["sharding"] |= {"ppo": "zero3", "offload": True}
    old["placement"] = dict.fromkeys(old["placement"], "gpus") | {"data": "local"}
    assert migrated(old)["where"] == {
        "default": {"processes": 1, "sharding": "none", "offload": True, "pool": "gpus"},
        "ppo": {"processes": 2, "sharding": "zero3"},
        "data": {"pool": "local"},
    }


def test_an_overlay_of_some_stages_says_these_alone() -> None:
    assert migrated({"extends": "base", "processes": {"ppo": 4}}) == {
        "extends": "base",
        "where": {"ppo": {"processes": 4}},
    }


def test_each_moved_section_is_refused_in_a_line_with_what_to_write() -> None:
    with pytest.raises(ParamsError) as caught:
        load(OLD)
    lines = str(caught.value).split("\n")
    assert [line.split(" ")[0] for line in lines] == ["processes", "sharding", "placement"]
    assert "write where.default.processes: 1, or" in lines[0]
    assert "where.default.sharding: none and where.default.offload: false" in lines[1]
    assert "write where.default.pool: local, or" in lines[2]
    with pytest.raises(ParamsError, match=r"write where\.ppo\.processes: 2"):
        load(DEMO, ["processes.ppo=2"])
    assert moved(read(DEMO), "demo.yaml") == []


def test_the_params_that_an_older_run_kept_are_read(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(
        dump(load(DEMO, ["where.default.pool=gpus", "where.ppo.processes=2"]))
    )
    kept_folder(tmp_path, "r1").mkdir(parents=True)
    (kept_folder(tmp_path, "r1") / "params.yaml").write_bytes(OLD.read_bytes())
    assert kept_params(tmp_path, "r1") == load(DEMO, OF_THEN), (
        "where the run was, not where today's are"
    )


def test_doctor_migrates_a_file_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    path = tmp_path / "params.yaml"
    path.write_bytes(OLD.read_bytes())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--migrate"])
    assert done.exit_code == 0, done.output
    assert load(path) == load(DEMO, OF_THEN)
    assert "where.default.processes absent -> 1" in done.output
    assert (tmp_path / "params.yaml.bak").read_bytes() == OLD.read_bytes()
    assert "nothing to migrate" in CliRunner().invoke(app, ["doctor", "--migrate"]).output
    old = yaml.safe_load(OLD.read_text())
    path.write_text(before := yaml.safe_dump({**old, "seed": -1}))
    assert isinstance(CliRunner().invoke(app, ["doctor", "--migrate"]).exception, ParamsError)
    assert path.read_text() == before
