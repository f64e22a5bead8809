"""What can be checked of any run: of the handwritten ones, and of those that the end-to-end test trained."""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.audit.accounts import Accounts, rows_of
from tests.audit.expected import comparisons, key_figure, total_comparison
from tests.audit.page import says


def check_ledger(content: dict[str, Any], accounts: Accounts) -> None:
    """What `rlhf report --json` prints of a run."""
    total = {
        "total_seconds": accounts.seconds, "total_usd": accounts.usd,
        "waste_usd": accounts.wasted_usd, "saved_usd": accounts.saved_usd,
        "usd_per_win_rate_point": accounts.usd_per_point, "skipped_rows": 0,
        "usd_per_device_hour": accounts.price("sft"),
        "started": accounts.events[0]["time"], "finished": accounts.ended,
    }  # fmt: skip
    agrees(content, total | total_comparison(accounts))
    assert (content["run_id"], content["state"]) == (accounts.run_id, "completed")
    assert [stage["stage"] for stage in content["stages"]] == list(accounts.stages)
    for stage in content["stages"]:
        account = accounts.stages[stage["stage"]]
        sides = comparisons(accounts, stage["stage"])
        facts: dict[str, Any] = {
            "seconds": account.spent.seconds, "usd": account.spent.usd,
            "device_seconds": account.spent.device_seconds, "rented": account.rented,
            "idle_usd": account.spent.usd - account.spent.device_seconds * account.price / 3600,
            "waste_seconds": account.wasted.seconds, "waste_usd": account.wasted.usd,
            "saved_seconds": account.made_seconds if account.cached else 0.0,
            "saved_usd": account.made_usd if account.cached else 0.0,
            "attempts": account.attempts, "failed_attempts": account.failed,
            "memory_retries": account.retries, "usd_per_device_hour": account.price,
            "peak_bytes": account.spent.peak_bytes,
            "attempt": accounts.noted[stage["stage"]]["attempt"],
            "world_size": accounts.place(stage["stage"])[1],
        }  # fmt: skip
        agrees(stage, facts | sides.pop("all"))
        assert (stage["cached"], stage["state"]) == (account.cached, account.state)
        phases = {phase["phase"]: phase for phase in stage["phases"]}
        assert set(phases) == {*account.phases, *sides}
        for name, phase in account.phases.items():
            keys = ("seconds", "usd", "tokens", "sequences", "peak_bytes")
            agrees(phases[name], {key: getattr(phase, key) for key in keys})
        for name, compared in sides.items():
            agrees(phases[name], compared)


def agrees(content: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = {
        key: (content[key], value)
        for key, value in expected.items()
        if content[key] != (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12))
    }
    assert not wrong, wrong


def check_summary(text: str, accounts: Accounts) -> None:
    """The table of a run on its pages in MLflow and Prefect."""
    rows = {line.split("|")[1].strip(): line.split("|", 2)[2] for line in text.splitlines() if line.startswith("| ")}
    for stage, account in accounts.stages.items():
        name = stage if account.state == "done" else f"{stage} ({account.state})"
        off = comparisons(accounts, stage)["all"]["error"]
        figure = key_figure(stage, accounts.metrics(stage))
        expected = [account.spent.seconds, account.spent.usd, off, *figure.numbers]
        assert says(rows[name], expected), rows[name]
    total = [accounts.seconds, accounts.usd, total_comparison(accounts)["error"]]
    point = [] if accounts.usd_per_point is None else [accounts.usd_per_point]
    assert says(rows["total"], [*total, *point]), rows["total"]


def runs_by_key(client: MlflowClient) -> dict[str, Any]:
    """What each MLflow run stands for -> the run; none may stand for the same."""
    experiment = client.get_experiment_by_name("rlhf-ledger")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    by_key = {run.data.tags["rlhf.key"].split("/", 1)[1]: run for run in runs}
    assert len(by_key) == len(runs)
    return by_key


def check_points(root: Path, client: MlflowClient, shipped: dict[str, Any]) -> None:
    """Each row of each attempt is a point of its metrics, and nothing else is. `shipped`: the runs of MLflow by what
    they stand for, RUN/STAGE/ATTEMPT.
    """
    for key in (key for key in shipped if "/" in key):
        run_id, stage, number = key.split("/")
        accounts = Accounts(root, run_id)
        expected: dict[str, list[tuple[int, float]]] = {}
        spent = 0.0
        for row in rows_of(root / "runs" / stage / "usage.jsonl"):
            if row["attempt"] == int(number):
                devices = max(1 if row["device"] == "cpu" else row["world_size"], accounts.rented(stage))
                price = accounts.price(stage)
                usd = row["seconds"] / 3600 * devices * price
                spent += usd
                expected.setdefault("usd_so_far", []).append((row["step"], spent))
                for name, value in {
                    "seconds": row["seconds"], "tokens": row["tokens"],
                    "peak_bytes": row["peak_bytes"], "usd": usd,
                }.items():  # fmt: skip
                    points = expected.setdefault(f"phase/{row['phase']}/{name}", [])
                    points.append((row["step"], value))
        for row in rows_of(root / "runs" / stage / "metrics.jsonl"):
            if row["attempt"] == int(number):
                for name, value in row["values"].items():
                    prefix = "eval" if stage == "evaluate" else stage
                    expected.setdefault(f"{prefix}/{name}", []).append((row["step"], value))
        run = shipped[key]
        assert set(run.data.metrics) == set(expected), key
        for name, points in expected.items():
            history = client.get_metric_history(run.info.run_id, name)
            values = sorted((point.step, point.value) for point in history)
            assert [step for step, _ in values] == [step for step, _ in sorted(points)]
            assert [value for _, value in values] == pytest.approx([v for _, v in sorted(points)])
