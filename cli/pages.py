"""Where to look at a run: its pages in Prefect and MLflow, and the commands that open them."""

import sys
from pathlib import Path

from config import jsonl
from config.records import PipelineRow
from config.schema import Params
from tasks.servers import HOST, Server
from tracking.cursor import cursor_path, load

DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000}


def pages(root: Path, params: Params, running: list[Server]) -> dict[str, str]:
    """Server -> URL of the newest run in its pages; the start page if it does not know the run."""
    rows: list[PipelineRow] = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    start = next((row for row in reversed(rows) if row.event == "start"), None)
    ports = DEFAULT_PORTS | {server.name: server.port for server in running}
    flow_run = start.detail.get("prefect.flow_run_id") if start else None
    cursor = load(cursor_path(root, params.tracking.uri))
    tracked = cursor.runs.get(start.run_id) if start else None
    mlflow = params.tracking.uri if params.tracking.uri.startswith("http") else f"http://{HOST}:{ports['mlflow']}"
    # MLflow opens as a tool for traces of language model applications unless it is told otherwise
    inside = f"/#/experiments/{cursor.experiment_id}/runs{f'/{tracked}' if tracked else ''}" if cursor.experiment_id else "/#/experiments"
    return {
        "prefect": f"http://{HOST}:{ports['prefect']}" + (f"/runs/flow-run/{flow_run}" if flow_run else ""),
        "mlflow": f"{mlflow}{inside}?workflowType=machine_learning",
    }


def this_command() -> str:
    """How to type `rlhf` here: by its path if the environment's folder is below the current one."""
    program = Path(sys.executable).with_name("rlhf")
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else "rlhf"
