"""`rlhf run`: the pipeline in this process, then its cost and where to look."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.commands.report import run_json, stage_table
from cli.flow_run import exit_code, run_flow
from cli.project import chosen_params, project_root, this_command
from cli.terminal import Terminal
from config.records import CHANGED_CODE_VARIABLE, kept_folder
from config.schema import Params
from reporting.build import REPORT
from reporting.inputs import read_findings
from reporting.verdict import verdict
from tasks.servers.processes import servers
from tasks.ui.links import NAMES, pages

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def run_pipeline(
    recipe: Path | None, overrides: list[str], yes: bool, as_json: bool, changed_code: str | None = None
) -> int:
    """Plan the run, then run the flow and print the result; returns the exit code. Raises RlhfError for what the user
    can fix and for a crash.
    """
    if changed_code is not None:
        os.environ[CHANGED_CODE_VARIABLE] = changed_code
    root = project_root()
    params = chosen_params(root, recipe, overrides)
    state = run_flow(root, params, yes, lambda: _start(params), recipe)
    if as_json:
        print(json.dumps(result(root, params), indent=2))
    else:
        show(root, params)
    if state.is_cancelled():
        print(f"rlhf: {state.message}", file=sys.stderr)
    code = exit_code(state)
    _end_without_server(code)
    return code


def _end_without_server(code: int) -> None:
    """Exit at once if the server is gone: Prefect's threads would try for minutes to send it the rest."""
    from tasks.servers.lost_server import is_gone

    if is_gone():
        print("warning: the Prefect server is gone, its pages do not show how this run ended.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start(params: Params) -> "State[Any]":
    from flows.rlhf import rlhf  # Prefect takes over a second to import and reads its settings at import
    from tasks.run.stop import on_signals
    from tasks.servers.lost_server import recorded_state

    began = time.time()
    try:
        with on_signals(interactive=False):  # a SIGTERM right after the end must not undo anything
            return rlhf(params, return_state=True)
    except Exception:  # exceptions of the flow are in its state: this one is Prefect's own
        state = recorded_state(Path.cwd(), began)
        if state is None:
            raise
        return state


def result(root: Path, params: Params) -> dict[str, Any]:
    """What `--json` prints: the ledger of the newest run, its report, its pages."""
    content = run_json(root, params)
    report = own_report(root, content["run_id"])
    return {**content, "report": str(report) if report else None, "pages": pages(root, params, servers(root))}


def own_report(root: Path, run_id: str) -> Path | None:
    """The current report if it belongs to this run, which then has its own copy; None if it belongs to an earlier
    one.
    """
    return root / REPORT if (kept_folder(root, run_id) / REPORT).exists() else None


def show(root: Path, params: Params) -> None:
    """The table, the verdict, the report, and the commands that open this run in Prefect's and MLflow's pages."""
    findings = read_findings(root, params)
    judged = verdict(findings)
    console = Terminal(soft_wrap=True)
    console.print()
    console.print(stage_table(findings))
    console.print(f"\n{judged.title}. {judged.sentence}", markup=False)
    report = own_report(root, findings.ledger.run_id)
    console.print(f"\nReport      {report or 'could not be written'}", markup=False)
    for name, url in pages(root, params, servers(root)).items():
        if name == "report":
            continue  # printed above, with its path
        opened = url if name == "runs" else f"{this_command()} up --open {name}   ({url})"
        console.print(f"{NAMES[name]:<11} {opened}", markup=False)
