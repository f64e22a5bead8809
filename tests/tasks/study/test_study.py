"""Studies: the file, the runs, and the table."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from benchmarks.projects.checkouts import checkout
from config.errors import OverBudget, ParamsError
from config.workspace.study import StudyFile, read_study
from costs.ledger.budget import Cost, excess
from reporting.comparison.runs import Comparison
from tasks.study.runs import limit_budget, works
from tests.conftest import ROOT

TINY = "tests/e2e/tiny.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: a.yaml\n", "variants: field required"),
        ("recipe: a.yaml\nvariants: {one: []}\n", "variants: dictionary should have at least 2"),
        ("recipe: a.yaml\nvariants: {a: [], b: []}\nseed: 1\n", "seed: extra inputs are not"),
        ("recipe: [\n", "is not YAML"),
        (
            "recipe: a.yaml\nvariants: {a: [], b: []}\ngrowth: {x: {a: 1, c: 2}}\n",
            "growth.x names 'c', which is no variant",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ParamsError, match=said):
        read_study(tmp_path / "mine.yaml")
    with pytest.raises(ParamsError, match="cannot be read: No such file"):
        read_study(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["levers", "scale"])
def test_the_studies_of_the_repository_are_ones(name: str) -> None:
    study = read_study(ROOT / "studies" / f"{name}.yaml")
    assert len(works(ROOT, study)) == len(study.variants) * len(study.seeds)


def test_variants_of_a_seed_follow_one_another_and_every_reply_is_kept() -> None:
    content = StudyFile(
        recipe=Path(TINY), seeds=[3, 4], set=["ppo.updates=9", "sft.max_steps=5"],
        variants={"a": [], "b": ["ppo.updates=2"]},
    )  # fmt: skip
    result = works(ROOT, content)
    assert [(item.name, item.seed) for item in result] == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]
    assert [item.params.seed for item in result] == [3, 3, 4, 4]
    assert [item.params.ppo.updates for item in result] == [9, 2, 9, 2]
    assert result[1].params.sft.max_steps == 5
    assert result[0].params.evaluate.samples == result[0].params.evaluate.prompts


def test_a_workspace_without_recipes_has_those_of_the_code_and_the_server_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = StudyFile(recipe=Path(TINY), variants={"a": [], "b": ["ppo.updates=2"]})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    for root, uri in ((tmp_path, "http://mlflow:5000"), (ROOT, f"sqlite:///{ROOT}/mlflow.db")):
        assert [work.params.tracking.uri for work in works(root, content)] == [uri, uri]


def test_variants_with_the_same_results_are_refused() -> None:
    content = StudyFile(recipe=Path(TINY), variants={"a": [], "b": ["where.ppo.processes=2"]})
    with pytest.raises(ParamsError, match="variants 'a' and 'b' have the same results"):
        works(ROOT, content)


def test_a_stopped_run_of_a_study_has_its_own_spending_and_what_is_left() -> None:
    params = works(ROOT, StudyFile(recipe=Path(TINY), variants={"a": [], "b": ["ppo.updates=2"]}))[0].params
    # of one dollar 0.6 are spent, 0.5 by the run that goes on: its budget counts them again
    limited = limit_budget(params, 1.0, 0.6, 0.5)
    assert limited.budget.max_usd == pytest.approx(0.9)
    assert excess(limited.budget, {"sft": Cost(0.5, 1.0)}, {"ppo": Cost(0.1, 1.0)}) is None
    assert limit_budget(params, None, 0.6, 0.5) == params
    with pytest.raises(OverBudget, match=r"the study has cost \$1\.10"):
        limit_budget(params, 1.0, 1.1, 0.5)


@pytest.mark.integration
def test_a_study_is_killed_goes_on_and_shares_what_its_variants_share(tmp_path: Path) -> None:
    project = checkout(tmp_path / "project")
    (project / "tiny.yaml").write_bytes((ROOT / TINY).read_bytes())
    (project / "studies").mkdir(exist_ok=True)
    (project / "studies/mine.yaml").write_text(
        "recipe: tiny.yaml\n"
        "variants:\n"
        "  as it is: []\n"
        "  other reward model: [reward.learning_rate=2.0e-3]\n"
        "  fewer updates: [ppo.updates=2]\n"
    )
    command = [str(Path(sys.executable).with_name("rlhf")), "study", "studies/mine.yaml", "--json"]
    environment = os.environ | {"PYTHONPATH": str(project)}
    first = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("2 of 3"):
            break
    time.sleep(6)
    first.send_signal(signal.SIGINT)
    rest = first.communicate(timeout=120)[1]
    assert "asked to stop" in rest or "as asked" in rest  # in a stage, or between two
    assert first.returncode == 75
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 3: as it is, seed 1: done before" in done.stderr
    # the third starts from the reward model of the first, though the second made another
    third = done.stderr.partition("3 of 3")[2]
    assert re.findall(r"^(\w+) +unchanged", third, re.M) == ["data", "sft", "reward"]
    result = Comparison.model_validate(json.loads(done.stdout))
    assert [variant.name for variant in result.variants] == ["as it is", "other reward model", "fewer updates"]
    assert result.variants[0].verdict == "base"
    assert all(len(variant.runs) == 1 for variant in result.variants)
    assert result.shared == ["data", "sft"]
    costs = [sum(variant.stages.values()) for variant in result.variants]
    assert result.spent_usd is not None
    assert result.spent_usd < 0.75 * sum(costs)  # data and SFT were made once
    assert "cheaper" in (project / ".rlhf/studies/mine/study.html").read_text()
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    (experiment,) = [
        search_experiment for search_experiment in client.search_experiments() if search_experiment.name != "Default"
    ]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("rlhf.kind") == "study"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.info.run_id for run in children} >= {
        run.info.run_id for run in runs if run.data.tags.get("rlhf.kind") == "run"
    }
    assert parent.info.status == "FINISHED"
    names = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert names == {"study.html", "study.json"}
