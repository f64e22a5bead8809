"""`rlhf chat`: find the models of a run and talk to them in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.project import project_root
from config.errors import UserError

if TYPE_CHECKING:
    from config.sections.run import Evaluate

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
    root = project_root()
    with _models_of(root, run) as (folder, settings):
        models = ["base", "sft", "aligned"] if compare else ["aligned"]
        command = [sys.executable, "-m", "training.inference.chat", "--folder", str(folder)]
        command += ["--models", *models, "--seed", str(seed)]
        command += ["--temperature", str(_first(temperature, settings.temperature))]
        command += ["--max-new-tokens", str(_first(max_new_tokens, settings.max_new_tokens))]
        code = subprocess.run(command, cwd=root, check=False).returncode
    raise typer.Exit(code)


def _first(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


@contextmanager
def _models_of(root: Path, run: str | None) -> Iterator[tuple[Path, "Evaluate"]]:
    """The folder with the params, data and models of a run, and its evaluation settings. What a run
    made is looked up by digest in DVC's cache or remote, whatever is in place now.

    Raises UserError for a run that is not there, ModelError if its models were deleted.
    """
    from config.load import load
    from config.workspace.champions import read_record
    from config.workspace.kept import kept_params
    from reporting.runs_named import resolve_one
    from tasks.champions.files import check_champion, gathered

    if run is None:
        yield root, load(root / "params.yaml").evaluate
    elif run == CHAMPION:
        champion = read_record(root).champion
        if champion is None:
            raise UserError("there is no champion yet: rlhf promote names one. Or leave it out.")
        yield check_champion(root, champion.run_id), kept_params(root, champion.run_id).evaluate
    else:
        run_id = resolve_one(root, run)
        with gathered(root, run_id, root / ".rlhf" / f"chat-{os.getpid()}") as folder:
            yield folder, kept_params(root, run_id).evaluate
