"""`rlhf chat`: which models of which run, and a process that they talk in."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.project import project_root, this_command
from config.errors import UserError

CHAMPION = "champion"


def chat(
    run: Annotated[
        str | None,
        typer.Argument(help="A run by its id, last, last-1, ..., or champion; what is in place."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Base, SFT and aligned model answer in turn."),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; without it, evaluate.temperature.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest reply; without it, evaluate.max_new_tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Talk to the aligned model in the terminal. A line is a message, an empty one starts anew,
    Ctrl-D ends it. Lines can be piped in.
    """
    from config.load import load

    root = project_root()
    folder = root if run is None else _folder(root, run)
    settings = load(root / "params.yaml").evaluate
    models = ["base", "sft", "aligned"] if compare else ["aligned"]
    command = [sys.executable, "-m", "training.inference.chat", "--folder", str(folder)]
    command += ["--models", *models, "--seed", str(seed)]
    command += ["--temperature", str(_first(temperature, settings.temperature))]
    command += ["--max-new-tokens", str(_first(max_new_tokens, settings.max_new_tokens))]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def _first(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _folder(root: Path, run: str) -> Path:
    """Where the models of a run are. Raises UserError if they are not to be had at once."""
    from config.workspace.champions import champion_folder, read_record
    from reporting.runs_named import resolve_one

    if run == CHAMPION:
        champion = read_record(root).champion
        if champion is None:
            raise UserError("there is no champion yet: rlhf promote names one. Or leave it out.")
        return champion_folder(root, champion.run_id)
    run_id = resolve_one(root, run)
    if not _in_place(root, run_id):
        raise UserError(
            f"the models in place are not those of {run_id}. {this_command()} restore {run_id} "
            "brings them back."
        )
    return root


def _in_place(root: Path, run_id: str) -> bool:
    """Whether dvc.lock has the aligned model that the run made or reused."""
    from config.workspace.kept import completed_stages, kept_params
    from tasks.dvc.status import digests

    method = kept_params(root, run_id).align.method
    model = f"models/{method}"
    made = completed_stages(root, run_id).get(method, {}).get(model)
    return made is not None and made == digests(root, method).outs.get(model)
