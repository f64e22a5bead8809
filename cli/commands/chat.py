"""`rlhf chat`: talk to the models of a run, which a separate process loads."""

import subprocess
import sys
from typing import Annotated

import typer

from cli.project import project_root
from cli.run_models import models_of


def chat(
    run: Annotated[
        str | None, typer.Argument(help="A run by its id, last, last-1, ..., or champion; what is in place.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Base, SFT, aligned model and student answer in turn.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; without it, evaluate.temperature.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest reply; without it, evaluate.max_new_tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Talk to a run's final model in the terminal. Each line is a message; an empty line starts a new conversation,
    Ctrl-D ends. Lines can be piped in.
    """
    root = project_root()
    with models_of(root, run, "chat") as (folder, params):
        settings = params.evaluate
        models = ["base", "sft", "aligned", *(["student"] if params.distill is not None else [])]
        models = models if compare else [params.tracking.model]
        command = [sys.executable, "-m", "training.inference.chat", "--folder", str(folder)]
        command += ["--models", *models, "--seed", str(seed)]
        command += ["--temperature", str(_first(temperature, settings.temperature))]
        command += ["--max-new-tokens", str(_first(max_new_tokens, settings.max_new_tokens))]
        code = subprocess.run(command, cwd=root, check=False).returncode
    raise typer.Exit(code)


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
