"""`rlhf serve`: the model of a run, or the champion's as it changes, behind OpenAI's HTTP API."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.export import champion_or_last, exported
from cli.project import project_root
from cli.run_models import CHAMPION


def serve(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run by its id, last, last-1, ..., or champion, whose successors take over as "
            "they are promoted; the champion if there is one, else the last run."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1.", min=1, max=65535)] = 8000,
    weights: Annotated[
        Literal["f32", "q8_0", "q4_0"], typer.Option(help="Which GGUF file of the export.")
    ] = "f32",
) -> None:
    """Serve a model at http://127.0.0.1:PORT/v1 (models, chat/completions, completions), with
    /health and /metrics, until Ctrl-C or SIGTERM; requests at work are answered first. A run that
    has no export yet is exported.
    """
    from serving.run import serve as serve_exports

    root = project_root()
    chosen = run or champion_or_last(root)

    def wanted() -> Path:
        return exported(root, chosen)

    def say(line: str) -> None:
        print(line, flush=True)

    serve_exports(root, port, wanted if chosen == CHAMPION else cache(wanted), weights, say)
