"""Every metric, parameter and tag of the runs in MLflow against an auditor's own sums."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.audit.accounts import STAGES, Accounts, rows_of
from tests.audit.checks import check_points, runs_by_key
from tests.audit.expected import comparisons, total_comparison
from tests.audit.ledgers import FIRST, ON_GPUS, SECOND, THIRD, write_ledgers
from tracking.sync import sync

pytestmark = pytest.mark.integration

RUNS = (FIRST, SECOND, THIRD)
WATTS = {"cpu": 170.0, "a100-80": 400.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("ledgers")
    params = write_ledgers(folder)
    shutil.copyfile(empty_database, folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sync(folder, params[SECOND])
    return folder


@pytest.fixture(scope="module")
def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


@pytest.fixture(scope="module")
def shipped(client: MlflowClient) -> dict[str, Any]:
    return runs_by_key(client)


def test_there_is_a_run_for_each_run_and_attempt(root: Path, shipped: dict[str, Any]) -> None:
    attempts = {
        f"{row['run_id']}/{stage}/{row['attempt']}": row
        for stage in STAGES
        for row in rows_of(root / "runs" / stage / "attempts.jsonl")
        if row["event"] == "start"
    }
    assert set(shipped) == {*RUNS, *attempts}
    for key, row in attempts.items():
        run_id, stage, number = key.split("/")
        run, parent = shipped[key], shipped[run_id]
        ends = [
            end
            for end in rows_of(root / "runs" / stage / "attempts.jsonl")
            if (end["attempt"], end["event"]) == (int(number), "end")
        ]
        code = ends[0]["exit_code"] if ends else None
        status = {0: "FINISHED", 75: "KILLED", None: "KILLED"}.get(code, "FAILED")
        assert (run.info.status, run.info.start_time) == (status, round(row["time"] * 1000)), key
        tags = {
            "mlflow.parentRunId": parent.info.run_id, "rlhf.kind": "stage", "rlhf.stage": stage,
            "rlhf.attempt": number, "rlhf.run_id": run_id,
        }  # fmt: skip
        if ends:
            tags |= {
                "rlhf.exit_code": str(code), "rlhf.fingerprint": f"print of {stage}",
                "rlhf.device": "cuda" if stage in ON_GPUS else "cpu",
            }  # fmt: skip
            assert run.info.end_time == round(ends[0]["time"] * 1000)
        if code == 3:
            tags["rlhf.message"] = "the loss is nan at step 2."
        assert {name: run.data.tags.get(name) for name in tags} == tags
        nickname = run_id.split("-", 2)[2]
        suffix = f" (attempt {number})" if number != "1" else ""
        assert run.info.run_name == f"{stage} of {nickname}{suffix}"


def test_every_row_is_a_point_of_its_metric(root: Path, client: MlflowClient, shipped: dict[str, Any]) -> None:
    check_points(root, client, shipped)


@pytest.mark.parametrize("run_id", RUNS)
def test_the_metrics_of_a_run_are_its_costs_its_plan_and_its_results(
    root: Path, shipped: dict[str, Any], run_id: str
) -> None:
    accounts, run = Accounts(root, run_id), shipped[run_id]
    watts = accounts.params["prices"]["watts"] or 30.0
    pools = accounts.params["prices"]["device_by_pool"]
    kwh = sum(
        account.spent.device_seconds / 3.6e6 * WATTS.get(pools.get(accounts.place(stage)[0]), watts)
        for stage, account in accounts.stages.items()
    )
    devices = sum(account.spent.device_seconds for account in accounts.stages.values())
    expected: dict[str, float | None] = {
        "cost/usd": accounts.usd, "cost/gpu_hours": devices / 3600,
        "cost/waste_usd": accounts.wasted_usd, "cost/saved_usd": accounts.saved_usd,
        "cost/seconds": accounts.seconds, "cost/made_usd": accounts.usd + accounts.saved_usd,
        "cost/milliusd": 1000 * accounts.usd, "cost/kwh": kwh,
        "cost/made_milliusd": 1000 * (accounts.usd + accounts.saved_usd),
        "cost/usd_per_win_rate_point": accounts.usd_per_point,
    }  # fmt: skip
    judged = accounts.metrics("evaluate")
    for end in ("", "_low", "_high"):
        expected[f"eval/win_rate{end}"] = judged.get(f"win_rate_gold{end}")
    for stage, account in accounts.stages.items():
        expected[f"stage_seconds/{stage}"] = account.spent.seconds
        expected[f"stage_usd/{stage}"] = account.spent.usd
        for name, phase in account.phases.items():
            expected[f"phase_seconds/{stage}/{name}"] = phase.seconds
            expected[f"phase_usd/{stage}/{name}"] = phase.usd
        prefix = "eval" if stage == "evaluate" else stage
        for name, value in accounts.metrics(stage).items():
            if isinstance(value, int | float):
                expected[f"{prefix}/{name}"] = float(value)
    sides = {f"plan/{stage}": comparisons(accounts, stage)["all"] for stage in accounts.stages}
    if accounts.compared():
        sides["plan"] = total_comparison(accounts)
    for prefix, side in sides.items():
        expected |= {
            f"{prefix}/{name}": side[key]
            for name, key in {
                "usd": "planned_usd", "seconds": "planned_seconds",
                "peak_bytes": "planned_peak_bytes", "error_seconds": "error",
                "error_peak_bytes": "error_peak_bytes",
            }.items()
        }  # fmt: skip
    wanted = {name: value for name, value in expected.items() if value is not None}
    assert set(run.data.metrics) == set(wanted)
    assert run.data.metrics == pytest.approx(wanted, abs=1e-12)


def test_a_run_has_its_params_what_it_changed_and_what_each_stage_did(root: Path, shipped: dict[str, Any]) -> None:
    states = {FIRST: "FINISHED", SECOND: "FINISHED", THIRD: "FAILED"}
    changed = {
        FIRST: ["first run"],
        SECOND: ["ppo.kl.coef: 0.07 → 0.05", "prices.usd_per_device_hour: 0.9 → 1.3"],
        THIRD: ["seed: 1 → 5", "prices.usd_per_device_hour: 1.3 → 2.1"],
    }
    for run_id in RUNS:
        run, accounts = shipped[run_id], Accounts(root, run_id)
        flat = dict(_flat(accounts.params))
        assert {key: run.data.params[key] for key in flat} == flat
        tags = run.data.tags
        for part in changed[run_id]:
            assert part in tags["rlhf.changed"]
        for stage, row in accounts.noted.items():
            state = "unchanged" if row.get("cached") else "made"
            assert tags[f"stage.{stage}"] == f"{state}, attempt {row['attempt']}"
        assert tags["rlhf.kind"] == "run"
        assert run.info.run_name == f"{run_id.split('-', 2)[2]} (ppo)"
        assert run.info.status == states[run_id]
        assert run.info.start_time == round(accounts.events[0]["time"] * 1000)
        assert run.info.end_time == round(accounts.ended * 1000)
        inputs = {
            dataset_input.dataset.name: dataset_input.dataset.digest for dataset_input in run.inputs.dataset_inputs
        }
        assert inputs == {"data/prepared": accounts.noted["data"]["detail"]["outs"]["data/prepared"]}
    assert shipped[SECOND].data.tags["mlflow.source.git.commit"] == "def456"


def test_the_replies_are_the_runs_own(
    root: Path, client: MlflowClient, shipped: dict[str, Any], tmp_path: Path
) -> None:
    path = client.download_artifacts(shipped[FIRST].info.run_id, "samples.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert rows == rows_of(Accounts(root, FIRST).file("evaluation/samples.jsonl"))


def _flat(content: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, float) or math.isfinite(value):
            pairs.append((f"{prefix}{key}", str(value)))
    return pairs
