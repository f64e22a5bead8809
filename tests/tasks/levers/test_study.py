"""The comparison end to end on the tiny recipe: four variants, stopped once, extended, repeated."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from config import jsonl
from config.errors import CostError, EnvironmentFault, ParamsError, StageStopped
from config.load import load, read
from config.records import AttemptRow
from config.schema import Params
from config.workspace.levers import FOLDER, Levers, read_levers
from reporting.levers_page import levers_sentence
from tasks.levers.stage_folders import alone
from tasks.levers.study import Study
from tasks.run.stop import StopRequest
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("quick_stages")]

ONLY = ["shared-trunk", "dpo", "best-of-16"]


def params(*assignments: str) -> Params:
    return load(ROOT / "tests/e2e/tiny.yaml", list(assignments))


def study(root: Path, only: list[str], stop: StopRequest | None = None) -> Study:
    return Study(root, params(), 1, only, stop or StopRequest())


def attempts(root: Path, stage: str) -> list[tuple[str, int | None]]:
    found = []
    for path in sorted((root / FOLDER / "stages").glob(f"{stage}-*/runs/{stage}/attempts.jsonl")):
        rows: list[AttemptRow] = jsonl.read(path, AttemptRow).rows
        found += [(row.event, row.exit_code) for row in rows]
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Levers]:
    """A comparison that was stopped in the middle of its first alignment, and went on."""
    root = tmp_path_factory.mktemp("levers")
    stop = StopRequest()

    def stop_in_ppo() -> None:
        while not list((root / FOLDER / "stages").glob("ppo-*/runs/ppo/metrics.jsonl")):
            time.sleep(0.05)
        stop.requests += 1

    thread = threading.Thread(target=stop_in_ppo)
    thread.start()
    with pytest.raises(StageStopped, match="the same command resumes there"):
        study(root, ONLY, stop).run()
    thread.join()
    assert attempts(root, "ppo")[-1] == ("end", 75)
    return root, study(root, ONLY).run()


@pytest.mark.slow
def test_every_variant_has_its_plan_its_cost_and_its_quality(compared: tuple[Path, Levers]) -> None:
    root, found = compared
    assert [each.name for each in found.variants] == ["baseline", *sorted(ONLY, key=order)]
    for each in found.variants:
        assert each.state == "done", each.reason
        assert each.quality_low < each.quality < each.quality_high  # type: ignore[operator]
        if each.name != "best-of-16":
            assert each.planned_usd > 0 < each.measured_usd  # type: ignore[operator]
            assert each.planned_peak_bytes > 2**26 < each.measured_peak_bytes  # type: ignore[operator]
            assert each.measured_total_usd > each.measured_usd  # type: ignore[operator]
            assert each.measured_flops > 0  # type: ignore[operator]
    assert found.judge == "gold"
    assert found.variants[0].difference == 0
    assert set(found.frontier) == {"ppo", "dpo", "best-of-n"}
    assert len(found.frontier["ppo"]) == 16 + 1, "each update, and the end"
    assert found.frontier["best-of-n"][0].kl == 0
    assert read_levers(root) == found


def order(name: str) -> int:
    return ["shared-trunk", "dpo", "best-of-16"].index(name)


@pytest.mark.slow
def test_the_target_was_written_before_the_others_ran(compared: tuple[Path, Levers]) -> None:
    root, found = compared
    target = json.loads((root / FOLDER / "target.json").read_text())
    assert target["target"] == pytest.approx(found.target)
    written = (root / FOLDER / "target.json").stat().st_mtime
    (path,) = (root / FOLDER / "stages").glob("dpo-*/runs/dpo/attempts.jsonl")
    assert written < jsonl.read(path, AttemptRow).rows[0].time


@pytest.mark.slow
def test_stages_that_variants_share_ran_once_and_the_stopped_one_went_on(
    compared: tuple[Path, Levers],
) -> None:
    root, _ = compared
    for stage in ("data", "sft", "reward", "dpo"):
        assert attempts(root, stage) == [("start", None), ("end", 0)], stage
    assert [code for event, code in attempts(root, "ppo") if event == "end"].count(75) == 1


@pytest.mark.slow
def test_again_nothing_runs_and_a_new_price_is_taken(compared: tuple[Path, Levers]) -> None:
    root, before = compared
    stages = {path: path.stat().st_mtime_ns for path in root.rglob("usage.jsonl")}
    dearer = Study(root, params("prices.usd_per_device_hour=0.2"), 1, ONLY, StopRequest()).run()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("usage.jsonl")} == stages
    for old, new in zip(before.variants, dearer.variants, strict=True):
        assert new.quality == old.quality
        if old.measured_usd is not None:
            assert new.measured_usd == pytest.approx(2 * old.measured_usd)


@pytest.mark.slow
def test_the_params_of_the_cheapest_are_a_whole_file(compared: tuple[Path, Levers]) -> None:
    root, found = compared
    path = root / FOLDER / "cheapest.yaml"
    assert path.exists() == (found.best is not None)
    if found.best is not None:
        changes = next(v for v in found.variants if v.name == found.best).changes
        written = read(path)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            assert written[section][name] == value


def test_a_name_that_is_no_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"--only magic is not a variant\. Known: baseline"):
        study(tmp_path, ["magic"]).run()


def test_a_comparison_above_the_budget_is_refused_before_it_starts(tmp_path: Path) -> None:
    poor = Study(tmp_path, params("budget.max_usd=0.0001"), 1, ["dpo"], StopRequest())
    with pytest.raises(CostError, match=r"budget\.max_usd=0\.0001 does not allow it"):
        poor.run()
    assert not (tmp_path / FOLDER).exists()


FLOW = """
import os
from pathlib import Path
from tasks.servers.prefect_settings import own_server, settings
from tasks.servers.processes import start_temporary
api = start_temporary(Path())
os.environ.update(settings(Path(), api) | own_server(Path(), api))
from prefect import get_client
from flows.levers import levers
from flows.scale import scale
params = {params!r}
state = levers(params, only={only!r}, return_state=True)
print(state.name, "|", state.message)
with get_client(sync_client=True) as client:
    names = sorted(run.name.rsplit("-", 1)[0] for run in client.read_task_runs())
    print(",".join(names))
    print(",".join(sorted(each.key for each in client.read_artifacts())))
wrong = scale(params, only=["magic"], return_state=True)
print(wrong.name, "|", wrong.message)
"""


@pytest.mark.slow
@pytest.mark.slow
def test_the_flow_has_a_task_for_each_variant_a_table_a_page_and_runs_in_mlflow(
    compared: tuple[Path, Levers],
) -> None:
    root, found = compared
    program = FLOW.format(params=params().model_dump(mode="json"), only=ONLY)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    state, tasks, artifacts, wrong = done.stdout.strip().splitlines()[-4:]
    assert state == f"Compared | {levers_sentence(found)}"
    assert tasks.split(",") == sorted(["baseline", *ONLY])
    assert artifacts == "levers"
    assert wrong.startswith("Failed | --only magic is not a factor.")
    assert "Cost against quality" in (root / "report/levers.html").read_text()
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    (experiment,) = [
        each for each in client.search_experiments() if each.name == params().tracking.experiment
    ]
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"levers of ppo", "baseline", *ONLY}


def test_a_baseline_that_fails_ends_the_comparison_and_is_tried_again(tmp_path: Path) -> None:
    source = "{kind: file, path: pairs.jsonl, format: pairs, columns: {}}"
    for attempt in (1, 2):
        made = Study(tmp_path, params(f"data.source={source}"), 1, ["dpo"], StopRequest())
        with pytest.raises(EnvironmentFault, match=r"the baseline failed.*pairs\.jsonl"):
            made.run()
        ends = [event for event, _ in attempts(tmp_path, "data")].count("end")
        assert ends == attempt


def test_two_comparisons_never_share_a_project(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(EnvironmentFault, match="is comparing levers"):
        study(tmp_path, ["dpo"]).run()
