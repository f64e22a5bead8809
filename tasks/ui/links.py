"""Where to look at a run: its pages in Prefect and MLflow."""

import os
from pathlib import Path

from config.ports import HOST
from config.schema import Params
from config.workspace.rows import pipeline_rows
from tasks.servers.processes import Server
from tracking.cursor import cursor_path, load
from tracking.runs_view import LINK_QUERY

NAMES = {"prefect": "Prefect", "mlflow": "MLflow", "runs": "All runs", "report": "Report"}
"""Names for people."""

DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000}

PREFECT_UI_VARIABLE, MLFLOW_UI_VARIABLE = "PREFECT_UI_URL", "RLHF_MLFLOW_UI_URL"
"""Environment variables with the addresses of the pages as people reach them, where programs have others: in
containers.
"""

REPORT_ARTIFACT = "report/report.html"
"""The report among the artifacts of the MLflow run."""


def pages(root: Path, params: Params, running: list[Server], run_id: str | None = None) -> dict[str, str]:
    """Server -> URL of a run in its pages, the newest if none is named; the start page if it does not know the run.

    `runs` is the list of all runs with the columns that matter, once MLflow has seen a run. `report` is there where
    MLflow knows the run: the report among its artifacts, once it was shipped.
    """
    rows = pipeline_rows(root)
    start = next((row for row in reversed(rows) if row.event == "start" and run_id in (None, row.run_id)), None)
    ports = DEFAULT_PORTS | {server.name: server.port for server in running}
    flow_run = start.detail.get("prefect.flow_run_id") if start else None
    cursor = load(cursor_path(root, params.tracking.uri))
    tracked = cursor.runs.get(start.run_id) if start else None
    mlflow_url = params.tracking.uri if params.tracking.uri.startswith("http") else f"http://{HOST}:{ports['mlflow']}"
    mlflow = os.environ.get(MLFLOW_UI_VARIABLE, mlflow_url).rstrip("/")
    prefect = os.environ.get(PREFECT_UI_VARIABLE, f"http://{HOST}:{ports['prefect']}").rstrip("/")
    links = {"prefect": prefect + (f"/runs/flow-run/{flow_run}" if flow_run else "")}
    # MLflow opens as a tool for traces of language model applications unless it is set otherwise
    runs = f"{mlflow}/#/experiments/{cursor.experiment_id}/runs" if cursor.experiment_id else f"{mlflow}/#/experiments"
    links["mlflow"] = f"{runs}{f'/{tracked}' if tracked else ''}?workflowType=machine_learning"
    if cursor.experiment_id:
        links["runs"] = f"{runs}?{LINK_QUERY}"
    if tracked:
        links["report"] = f"{runs}/{tracked}/artifacts/{REPORT_ARTIFACT}?workflowType=machine_learning"
    return links
