"""`rlhf retrain`, `rlhf promote`, `rlhf rollback`: decide which model is in use."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.project import chosen_params, project_root
from config.errors import UserError
from config.load import load
from config.workspace.champions import ChampionRecord, read_record
from config.workspace.kept import kept_params

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs instead of lines.")]


def retrain_cycle(recipe: Path | None, overrides: list[str], force: bool, yes: bool, as_json: bool) -> int:
    """Run one cycle in this process and print its outcome; returns the exit code. Raises RlhfError as `rlhf run`
    does.
    """
    from cli.flow_run import exit_code, run_flow

    root = project_root()
    params = chosen_params(root, recipe, overrides)
    state = run_flow(root, params, yes, lambda: _start(params, force), retrain=True)
    ended = _ended(root)
    if as_json:
        print(json.dumps(ended, indent=2))
    else:
        print(f"{ended['outcome'].capitalize()}: {ended['said']}\nDetails     {ended['page']}")
    return exit_code(state)


def _start(params: Any, force: bool) -> "State[Any]":
    from flows.retrain import retrain

    return retrain(params, force, return_state=True)


def _ended(root: Path) -> dict[str, Any]:
    """The outcome of the newest cycle, for `--json`."""
    from config import jsonl
    from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, RetrainRow

    row: RetrainRow = next(
        row for row in reversed(jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows) if row.event == "end"
    )
    folder = root / RETRAIN_FOLDER / row.cycle
    records = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if (folder / f"{name}.json").exists()
        else None
        for name in ("examination", "contest")
    }
    return {
        "cycle": row.cycle,
        "outcome": row.outcome,
        "said": row.said,
        "run_id": row.run_id,
        "usd": row.detail.get("usd", 0.0),
        "champion": _champion_id(read_record(root)),
        **records,
        "page": str(folder / "cycle.md"),
    }


def promote(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A completed run, by id or as last, last-1, ...")
    ] = "last",
    why: Annotated[str, typer.Option(help="The reason, for the record.")] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the model of a run the champion without a contest; the current one becomes `previous`. rlhf retrain
    promotes on evidence.
    """
    from reporting.runs_named import resolve_one
    from tasks.champions.registry import promote as put_in_place

    root = project_root()
    run_id = resolve_one(root, run)
    before = _champion_id(read_record(root))
    against = f" instead of {before}" if before and before != run_id else ""
    _confirm(f"{_figures(root, run_id)}\nMake {run_id} the champion{against}?", yes)
    record = put_in_place(root, run_id, why or "by hand")
    _announce(root, record, f"{run_id} is the champion{against}.", as_json)


def rollback(
    why: Annotated[str, typer.Option(help="The reason, for the record.")] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the previous champion the champion again."""
    from tasks.champions.registry import rollback as go_back

    root = project_root()
    record = read_record(root)
    if record.champion is not None and record.previous is not None:
        _confirm(f"Go back from {record.champion.run_id} to {record.previous.run_id}?", yes)
    after = go_back(root, why or "by hand")
    _announce(root, after, f"{_champion_id(after)} is the champion again, instead of {_champion_id(record)}.", as_json)


def _confirm(question: str, yes: bool) -> None:
    """Ask for confirmation. Raises UserError without it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(
            f"{question.splitlines()[-1]} stdin is not a terminal: approve with --yes. Nothing was changed."
        )
    print(f"{question} [y/N] ", file=sys.stderr, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("not confirmed: nothing was changed.")


def _figures(root: Path, run_id: str) -> str:
    """The run's own evaluation, in a line."""
    from reporting.inputs import read_findings
    from reporting.verdict import verdict

    judged = verdict(read_findings(root, kept_params(root, run_id), run_id))
    return f"{judged.title}. {judged.sentence}"


def _announce(root: Path, record: ChampionRecord, message: str, as_json: bool) -> None:
    from tasks.champions.registry import update_mlflow

    fault = update_mlflow(root, load(root / "params.yaml"))
    if fault:
        print(f"warning: {fault}", file=sys.stderr)
    if as_json:
        print(json.dumps(json.loads(record.model_dump_json()), indent=2))
    else:
        previous = record.previous.run_id if record.previous else "nobody"
        print(f"{message} Previous: {previous}. Recorded in champions/record.json.")


def _champion_id(record: ChampionRecord) -> str | None:
    return record.champion.run_id if record.champion else None
