"""dvc.yaml against the code: what decides a stage's numbers must be in its deps, and nothing else."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo

from config.dvc_stages import defined
from config.methods.registry import METHODS, stage_module
from config.records import STAGES
from config.sections.where import SHARED_STAGES
from tests.conftest import ROOT
from training.process.run import entry

PIPELINE = defined(ROOT)
ROOMS_OF_PLUMBING = ("training/process/", "training/distributed/")
PLUMBING = ("training/__init__.py", "training/preparation/download.py")
NUMBERS = ("training/process/curves.py",)
"""In a room of plumbing, and yet what it writes is an output."""


def is_plumbing(path: str) -> bool:
    """Whether changes of a file change nothing that a stage computes: see the top of dvc.yaml."""
    in_room = path.startswith(ROOMS_OF_PLUMBING) and path not in NUMBERS
    return in_room or path in PLUMBING


def imported(path: Path, found: set[str]) -> set[str]:
    """Files of training/ that `path` needs, directly or not."""
    name = str(path.relative_to(ROOT))
    if name in found or not path.exists():
        return found
    found.add(name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    only_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "training":
            modules = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                imported(ROOT / f"{module.replace('.', '/')}.py", found)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_code_that_decides_its_numbers(stage: str) -> None:
    code = [dep for dep in PIPELINE[stage]["deps"] if dep.startswith("training/")]
    together = {stage_module(name) for name in (METHODS if stage in METHODS else (stage,))}
    needed = set().union(
        *(imported(ROOT / f"{name.replace('.', '/')}.py", set()) for name in together)
    )  # one list for all methods
    covered = {path: [dep for dep in code if path.startswith(dep)] for path in needed}
    assert all(is_plumbing(path) for path, deps in covered.items() if not deps)
    assert {dep for deps in covered.values() for dep in deps} == {*code}
    assert all(len(deps) < 2 for deps in covered.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_method_depends_on_its_own_file(method: str) -> None:
    code = {dep for dep in PIPELINE[method]["deps"] if dep.startswith("config/")}
    assert code == {f"config/methods/{method}.py"}


def test_all_methods_are_one_stage_that_is_made_for_the_one_in_params_yaml() -> None:
    align = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["align"]
    assert align["foreach"] == ["${align.method}"]
    with Repo(str(ROOT)) as repo:
        assert [stage.name for stage in repo.index.stages if "align" in stage.name] == ["align@ppo"]


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_depends_on_prices_or_tracking(stage: str) -> None:
    sections = {name.split(".")[0] for name in PIPELINE[stage]["params"] if isinstance(name, str)}
    assert not sections & {"where", "prices", "tracking"}
    assert "seed" in sections


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_keeps_its_previous_output_until_it_has_a_new_one(stage: str) -> None:
    entry = PIPELINE[stage]
    if stage != "evaluate":
        assert all(settings.get("persist") for out in entry["outs"] for settings in out.values())
    names = [name if isinstance(name, str) else next(iter(name)) for name in entry["outs"]]
    assert f"metrics/{stage}.json" in names
    launched = stage in SHARED_STAGES
    assert entry["cmd"] == (
        f"python -m training.process.launch {stage}" if launched else f"python -m training.{stage}"
    )


def test_the_default_remote_is_the_same_for_every_checkout_of_a_user() -> None:
    config = (ROOT / ".dvc" / "config").read_text()
    assert "url = ~/.cache/" in config
    assert "analytics = false" in config


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_watches_the_params_that_dvc_records(stage: str) -> None:
    assert list(entry(stage).sections) == [key for key in PIPELINE[stage]["params"] if isinstance(key, str)]


def test_the_reward_model_depends_on_what_it_reads_of_the_datas_metrics() -> None:
    assert {"metrics/data.json": list(import_module("training.reward").OF_DATA)} in PIPELINE["reward"]["params"]
    assert "metrics/data.json" not in PIPELINE["reward"]["deps"]
