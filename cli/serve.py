"""`rlhf serve`: the model of a run, or the champion's as it changes, behind OpenAI's HTTP API."""

from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from cli.export import champion_or_last, exported
from cli.project import project_root
from cli.run_models import CHAMPION
from serving.settings import Address, EngineName, Weights


def serve(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run by its id, last, last-1, ..., or champion, whose successors take over as "
            "they are promoted; the champion if there is one, else the last run."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1.", min=1, max=65535)] = 8000,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="llama_cpp; transformers, for any architecture, one reply at a time; or vllm, on "
            "a GPU, from an environment of its own."
        ),
    ] = "llama_cpp",
    weights: Annotated[
        Weights, typer.Option(help="Which GGUF file of the export llama_cpp loads.")
    ] = "f32",
    listen: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 within a container.")
    ] = "127.0.0.1",
    host: Annotated[
        list[str] | None,
        typer.Option(help="A Host header to answer to, besides localhost:PORT; repeatable."),
    ] = None,
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

    address = Address(port, listen, tuple(host or ()))
    follow = wanted if chosen == CHAMPION else cache(wanted)
    serve_exports(root, address, follow, engine, weights, say)
