"""A flow run from the command line: its planned cost is printed, then it runs in this process, against the running
server or a temporary one.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import (
    EXIT_DONE,
    EXIT_OVER_BUDGET,
    EXIT_RESUMABLE,
    CheckpointError,
    CostError,
    EnvironmentFault,
    RlhfError,
)
from config.records import CHANGED_CODE_VARIABLE, CONTINUE, RESTART
from config.schema import Params
from tasks.run.stop import OVER_BUDGET
from tasks.servers.prefect_settings import settings
from tasks.servers.processes import prefect_api, start_temporary

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from tasks.planning.prepared import Planned, Unplannable
    from tasks.run.changed_code import ChangedCode


def run_flow(
    root: Path,
    params: Params,
    yes: bool,
    start: "Callable[[], State[Any]]",
    recipe: Path | None = None,
    retrain: bool = False,
) -> "State[Any]":
    """Plan first, then `start`, which imports a flow and runs it; returns the state of a run that was done or stopped.
    Of a `retrain` cycle its own processes are planned too.

    Raises CostError if it was not to be started, EnvironmentFault if Prefect cannot run it, and what the flow failed
    with.
    """
    prepared = plan_first(root, params, yes, recipe, retrain)
    from tasks.planning.prepared import known_plan

    # a cycle looks at its data first, and plans then
    with known_plan(None if retrain else prepared):
        return on_server(root, start)


def on_server(root: Path, start: "Callable[[], State[Any]]") -> "State[Any]":
    """Run a flow on the running server or a temporary one. Raises as `run_flow`, which is for flows with a plan."""
    if "PREFECT_API_URL" in os.environ:  # a server named by the user
        os.environ.update(settings(root, None))
    else:
        os.environ.update(settings(root, prefect_api(root) or _temporary(root)))
    try:
        state = start()
    except RuntimeError as error:
        raise EnvironmentFault(
            f"Prefect could not run the flow: {' '.join(str(error).split()).rstrip('.')}. Run rlhf "
            "doctor, or start a server first with rlhf up."
        ) from error
    if state.is_failed() or state.is_crashed():
        raise reason(state)
    return state


def exit_code(state: "State[Any]") -> int:
    """The exit code of a run that was done, stopped, or has reached its budget."""
    if not state.is_cancelled():
        return EXIT_DONE
    return EXIT_OVER_BUDGET if state.name == OVER_BUDGET else EXIT_RESUMABLE


def _temporary(root: Path) -> str:
    print("Starting a temporary Prefect server ...", file=sys.stderr, flush=True)
    return start_temporary(root)


def plan_first(
    root: Path, params: Params, yes: bool, recipe: Path | None = None, retrain: bool = False
) -> "Planned | Unplannable":
    """Print the planned cost and the differences from the recipe (None: the nearest one); refuse a run over budget,
    ask for approval where needed; returns the plan of the run. Raises CostError.
    """
    from tasks.planning.budget_gate import gate, needs_approval
    from tasks.planning.plan_text import summary
    from tasks.planning.prepared import prepare
    from tasks.planning.retraining import with_cycle
    from tasks.run.changed_code import is_answered, policy
    from tasks.run.recipe import differs_from_recipe

    if differs := differs_from_recipe(root, params, recipe):
        print(differs, file=sys.stderr)

    def decide(changed: "Sequence[ChangedCode]") -> str:
        if not is_answered() and not yes and sys.stdin.isatty():
            os.environ[CHANGED_CODE_VARIABLE] = _ask(changed)
        return policy()

    run_alone = prepare(root, params, decide)
    prepared = with_cycle(run_alone) if retrain else run_alone
    for line in summary(prepared):
        print(line, file=sys.stderr)
    warning = gate(root, run_alone)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if needs_approval(prepared) and not yes:
        _ask_for_approval(prepared.ahead_total.usd, params.budget.approval_usd)
    return run_alone


def _ask_for_approval(planned_usd: float, approval_usd: float | None) -> None:
    """Raises CostError unless the user at the terminal approves."""
    above = f"{planned_usd:.4g} USD are planned, above budget.approval_usd={approval_usd:g}"
    if not sys.stdin.isatty():
        raise CostError(
            f"{above}, and stdin is not a terminal. Approve with --yes, or raise budget.approval_usd in params.yaml."
        )
    print(f"{above}. Start the run? [y/N] ", file=sys.stderr, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CostError(f"{above}: not approved, nothing was started.")


def _ask(changed: "Sequence[ChangedCode]") -> str:
    """Ask at the terminal what to do with checkpoints of other code. Raises CheckpointError without an answer."""
    for change in changed:
        print(change, file=sys.stderr)
    print("Go on from there, or start over? [c]ontinue, [r]estart: ", file=sys.stderr, end="", flush=True)
    words = sys.stdin.readline().strip().lower()
    for answer in (CONTINUE, RESTART):
        if words and answer.startswith(words):
            return answer
    raise CheckpointError(f"{changed[0]} Nothing was started. Say --changed-code {CONTINUE} or {RESTART}.")


def reason(state: "State[Any]") -> RlhfError:
    """Our own error as it was raised, anything else as one line."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, RlhfError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(
            f"{error.filename or 'this checkout'}: no space left on the disk. Free some (rlhf "
            "clean says what can go); rlhf run resumes there."
        )
    return RlhfError(
        f"the run failed: {state.message or error}. What the stages printed is in "
        "runs/<stage>/log.txt; rlhf run resumes there."
    )
