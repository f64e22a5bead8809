"""`rlhf up`, `down` and `status`."""

import json
import os
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.project import chosen_params, project_root, this_command
from cli.run_models import CHAMPION, run_id_of
from cli.terminal import Terminal
from config.errors import EnvironmentFault, ParamsError, RlhfError
from config.load import load
from config.workspace.at_work import locked, run_at_work
from config.workspace.login import MLFLOW_KEY, MLFLOW_USER, SERVE_KEY, key
from config.workspace.rows import ENDED, pipeline_rows
from tasks.run.run import end_left_open
from tasks.servers.flow_runs import runs_at_work
from tasks.servers.logins import asks_for_key, asks_for_login
from tasks.servers.plans import SERVE, is_postgresql, mlflow_plan, prefect_plan, serve_plan, worker_plan
from tasks.servers.prefect_settings import api_key, own_server, settings
from tasks.servers.processes import Server, log_path, servers, start, stop
from tasks.ui.links import NAMES, pages

if TYPE_CHECKING:
    from tasks.deployment.deployments import Deployed


def up(
    prefect_port: int,
    mlflow_port: int,
    serve_port: int | None,
    open_page: str | None,
    notify: str | None,
    no_auth: bool,
    mlflow_auth: bool,
) -> None:
    """Start both servers, deploy the flows, start the worker, and print where to look. Raises EnvironmentFault for a
    taken port.
    """
    if open_page not in (None, "prefect", "mlflow"):
        raise ParamsError(f"--open {open_page} is not a server: it is prefect or mlflow.")
    root = project_root()
    params = chosen_params(root, None, [])
    console = Terminal(soft_wrap=True)
    with_key = not no_auth
    plans = [
        plan
        for plan in (
            prefect_plan(root, prefect_port, params.tracking, with_key),
            mlflow_plan(root, params.tracking, mlflow_port, mlflow_auth),
            None if serve_port is None else serve_plan(_with_champion(root), serve_port),
        )
        if plan
    ]
    _make_databases(params.tracking.uri, console)
    console.print("Starting the servers ..." if not servers(root) else "Looking at the servers ...")
    running = start(root, plans)
    for plan, server in ((plan, server) for plan in plans for server in running if server.name == plan.name):
        if server.port != plan.port:
            console.print(
                f"{plan.name} runs on port {server.port} already, not on {plan.port}. To move it: "
                f"{this_command()} down, then up again.",
                markup=False,
            )
    prefect = next(server for server in running if server.name == "prefect")
    asks_login, login = _checked_logins(root, running, params.tracking.uri, no_auth, mlflow_auth)
    page_urls = pages(root, params, running)
    rows = [(NAMES[name], url) for name, url in page_urls.items()]
    if asks_login:
        rows.append(("Key", f"{api_key(root)}   (Prefect's pages ask for it once in each browser)"))
    if login:
        password = key(root / MLFLOW_KEY)
        rows.append(("Login", f"{MLFLOW_USER}, {password}   (MLflow's pages ask for it)"))
    model = next((server for server in running if server.name == SERVE), None)
    if model is not None:
        rows.append(("Model", f"{model.url}/v1   (its key is in {SERVE_KEY})"))
    _say(console, rows)
    deployed = _work(root, prefect, notify)
    for deployment in deployed:
        about = f"{deployment.name}, on a schedule" if deployment.scheduled else deployment.name
        _say(console, [("Form", f"{deployment.url}/run   ({about})")])
    console.print(
        f"Stop all with {this_command()} down. The logs are in {log_path(root, 'prefect').parent}.", markup=False
    )
    if open_page:
        webbrowser.open(page_urls[open_page])


def _with_champion(root: Path) -> Path:
    """`root` if there is a champion to serve. Raises UserError."""
    run_id_of(root, CHAMPION)
    return root


def _make_databases(tracking_uri: str, console: Terminal) -> None:
    if not is_postgresql(tracking_uri):
        return
    from tasks.servers.databases import ensure_databases  # takes half a second to import

    for name in ensure_databases(tracking_uri):
        console.print(f"Created the database {name}.", markup=False)


def _say(console: Terminal, rows: Sequence[tuple[str, str]]) -> None:
    for name, value in rows:
        console.print(f"{name:<8} {value}", markup=False)


def _checked_logins(
    root: Path, running: Sequence[Server], tracking_uri: str, no_auth: bool, mlflow_auth: bool
) -> tuple[bool, bool]:
    """Whether Prefect's server asks for its key, and MLflow's for a password. Raises EnvironmentFault if a running
    server is configured otherwise.
    """
    prefect = next(server for server in running if server.name == "prefect")
    asks_key = asks_for_key(root, prefect)
    if no_auth and asks_key:
        raise EnvironmentFault(
            f"the Prefect server on {prefect.url} asks for its key. Stop it with {this_command()} "
            "down, then --no-auth again."
        )
    mlflow = next((server for server in running if server.name == "mlflow"), None)
    if mlflow_auth and mlflow is None:
        raise ParamsError(
            f"--mlflow-auth is for the MLflow server of this project, tracking.uri="
            f"{tracking_uri} is another one. Leave it out: that server has its own login."
        )
    login = mlflow is not None and asks_for_login(root, mlflow)
    if mlflow_auth and mlflow is not None and not login:
        raise EnvironmentFault(
            f"the MLflow server on {mlflow.url} asks for no password. Stop it with "
            f"{this_command()} down, then --mlflow-auth again."
        )
    return asks_key, login


def _work(root: Path, prefect: Server, notify: str | None) -> list["Deployed"]:
    """Deploy the flows and start the worker that runs them."""
    api = f"{prefect.url}/api"
    os.environ.update(settings(root, api) | own_server(root, api))
    # Prefect takes over a second to import and reads its settings at import
    from tasks.deployment.deployments import await_worker, deploy

    deployed = deploy(root, notify)
    start(root, [worker_plan(root, api)])
    await_worker()
    return deployed


def down() -> None:
    """Let running stages checkpoint, then stop the worker and the servers."""
    root = project_root()
    at_work = runs_at_work(root)
    if at_work:
        print(f"Letting {'the run' if len(at_work) == 1 else f'{len(at_work)} runs'} checkpoint ...", flush=True)
    names = [server.name for server in stop(root)]
    print(
        f"Stopped {', '.join(names[:-1])}{' and ' if names[1:] else ''}{names[-1]}."
        if names
        else "No server of this project was running."
    )


def status(as_json: bool) -> None:
    """Which servers are up, and the newest run's state. The end of a killed one is recorded."""
    root = project_root()
    _record_killed(root)
    rows = pipeline_rows(root)
    newest = rows[-1] if rows else None
    ends = {row.run_id: row.state for row in rows if row.event == "end"}
    shown: dict[str, Any] = {
        "servers": [
            {**server._asdict(), "url": server.url, "healthy": server.is_healthy()} for server in servers(root)
        ],
        "run": {"run_id": newest.run_id, "state": ends.get(newest.run_id, "running")} if newest else None,
    }
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    for server in shown["servers"]:
        print(
            f"{server['name']:<8} {'answers' if server['healthy'] else 'does not answer'} on "
            f"{server['url']} (process {server['pid']})"
        )
    if not shown["servers"]:
        print(f"No server of this project is running. Start them with {this_command()} up.")
    print(f"Newest run {shown['run']['run_id']}: {shown['run']['state']}." if newest else "No run yet.")


def _record_killed(root: Path) -> None:
    """Write the end of a run that was killed, and tell MLflow; Prefect finds out by itself."""
    rows = pipeline_rows(root)
    if not rows or rows[-1].event in ENDED or run_at_work(root):
        return
    from tracking.sync import sync  # MLflow takes seconds to import

    with locked(root):
        end_left_open(root)
    with suppress(RlhfError):  # the next run tells it
        sync(root, load(root / "params.yaml"))
