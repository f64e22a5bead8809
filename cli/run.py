"""`rlhf run`: the pipeline in this process, then what it cost and where to look."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cli.project import chosen_params, project_root, this_command
from cli.report import run_json, stage_table
from config.errors import EXIT_DONE, EXIT_RESUMABLE, CostError, EnvironmentFault, RlhfError
from config.schema import Params
from reporting.build import REPORT
from reporting.inputs import kept_folder, read_findings
from reporting.verdict import verdict
from tasks.orchestrator import settings
from tasks.pages import NAMES, pages
from tasks.servers import prefect_api, servers

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def run_pipeline(recipe: Path | None, overrides: list[str], yes: bool, as_json: bool) -> int:
    """Plan the run, then run the flow and print the result; returns the exit code. Raises RlhfError for what the user can mend and for a crash."""
    root = project_root()
    params = chosen_params(root, recipe, overrides)
    plan_first(root, params, yes)
    os.environ.update(settings(root, prefect_api(root)))
    if "PREFECT_API_URL" not in os.environ:
        print("Starting a temporary Prefect server ...", file=sys.stderr, flush=True)
    state = _run_flow(params)
    if state.is_failed() or state.is_crashed():
        raise reason(state)
    if as_json:
        print(json.dumps(result(root, params), indent=2))
    else:
        show(root, params)
    if state.is_cancelled():
        print(f"rlhf: {state.message}", file=sys.stderr)
        return EXIT_RESUMABLE
    return EXIT_DONE


def plan_first(root: Path, params: Params, yes: bool) -> None:
    """Say what the run will cost; refuse it above the budget, and ask where it needs approval. Raises CostError."""
    from tasks.plan import gate, needs_approval, prepare, summary

    prepared = prepare(root, params)
    for line in summary(prepared):
        print(line, file=sys.stderr)
    warning = gate(root, prepared)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if not needs_approval(prepared) or yes:
        return
    above = f"{prepared.ahead_total.usd:.4g} USD are planned, above budget.approval_usd={params.budget.approval_usd:g}"
    if not sys.stdin.isatty():
        raise CostError(f"{above}, and nobody is there to ask. Approve with --yes, or raise budget.approval_usd in params.yaml.")
    print(f"{above}. Start the run? [y/N] ", file=sys.stderr, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CostError(f"{above}: not approved, nothing was started.")


def _run_flow(params: Params) -> "State[Any]":
    from flows.rlhf import rlhf  # Prefect takes over a second to import, and reads its settings when it is

    try:
        return rlhf(params, return_state=True)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"Prefect could not run the flow: {' '.join(str(error).split()).rstrip('.')}. Run rlhf doctor, or start a server first with rlhf up."
        ) from error


def reason(state: "State[Any]") -> RlhfError:
    """Our own error as it was raised, anything else in one line."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, RlhfError):
        return error
    return RlhfError(
        f"the run failed: {state.message or error}. What the stages printed is in runs/<stage>/log.txt; rlhf run goes on from there."
    )


def result(root: Path, params: Params) -> dict[str, Any]:
    """What `--json` prints: the ledger of the newest run, its report, its pages."""
    content = run_json(root, params)
    report = own_report(root, content["run_id"])
    return {
        **content,
        "report": str(report) if report else None,
        "pages": pages(root, params, servers(root)),
    }


def own_report(root: Path, run_id: str) -> Path | None:
    """The report in place if it is of this run, which then kept a copy of it; None if it is of an earlier one."""
    return root / REPORT if (kept_folder(root, run_id) / REPORT).exists() else None


def show(root: Path, params: Params) -> None:
    """The table, the verdict, the report, and the commands that open this run in Prefect's and MLflow's pages."""
    findings = read_findings(root, params)
    judged = verdict(findings)
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(stage_table(findings))
    console.print(f"\n{judged.title}. {judged.sentence}", markup=False)
    report = own_report(root, findings.ledger.run_id)
    console.print(f"\nReport      {report or 'could not be written'}", markup=False)
    for name, url in pages(root, params, servers(root)).items():
        if name == "report":
            continue  # named above, by its path
        console.print(f"{NAMES[name]:<11} {this_command()} up --open {name}   ({url})", markup=False)
