"""`rlhf up`, `down` and `status`."""

import json
import webbrowser
from typing import Any

from rich.console import Console

from cli.pages import pages, this_command
from cli.project import chosen_params, project_root
from config import jsonl
from config.errors import ParamsError
from config.records import PipelineRow
from tasks.servers import log_path, mlflow_plan, prefect_plan, servers, start, stop


def up(prefect_port: int, mlflow_port: int, open_page: str | None) -> None:
    """Start both servers and print their pages. Raises EnvironmentFault for a taken port."""
    if open_page not in (None, "prefect", "mlflow"):
        raise ParamsError(f"--open {open_page} is not a server: it is prefect or mlflow.")
    root = project_root()
    params = chosen_params(root, None, [])
    console = Console(highlight=False, soft_wrap=True)
    plans = [plan for plan in (prefect_plan(root, prefect_port), mlflow_plan(root, params.tracking, mlflow_port)) if plan]
    console.print("Starting the servers ..." if not servers(root) else "Looking at the servers ...")
    running = start(root, plans)
    found = pages(root, params, running)
    for name, url in found.items():
        console.print(f"{name.capitalize():<8} {url}", markup=False)
    console.print(f"Stop them with {this_command()} down. They log to {log_path(root, 'prefect').parent}.", markup=False)
    if open_page:
        webbrowser.open(found[open_page])


def down() -> None:
    """Stop the servers."""
    stopped = stop(project_root())
    names = " and ".join(server.name for server in stopped)
    print(f"Stopped {names}." if stopped else "No server of this project was running.")


def status(as_json: bool) -> None:
    """Which servers run, and how the newest run stands."""
    root = project_root()
    rows: list[PipelineRow] = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    newest = rows[-1] if rows else None
    shown: dict[str, Any] = {
        "servers": [{**server._asdict(), "url": server.url, "healthy": server.is_healthy()} for server in servers(root)],
        "run": {"run_id": newest.run_id, "state": newest.state if newest.event == "end" else "at work, or killed"} if newest else None,
    }
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    for server in shown["servers"]:
        print(f"{server['name']:<8} {'answers' if server['healthy'] else 'does not answer'} on {server['url']} (process {server['pid']})")
    if not shown["servers"]:
        print(f"No server of this project is running. Start them with {this_command()} up.")
    print(f"Newest run {shown['run']['run_id']}: {shown['run']['state']}." if newest else "No run yet.")
