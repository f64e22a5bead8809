"""`rlhf serve`: a run's model, or the champion and its successors, behind OpenAI's HTTP API."""

import os
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from cli.commands.export import champion_or_last, exported
from cli.project import project_root
from cli.run_models import CHAMPION, run_id_of
from config.errors import ParamsError
from serving.settings import Address, Challenger, EngineName, Weights


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
        EngineName, typer.Option(help="llama_cpp; or vllm, for GPUs and any architecture, from its own environment.")
    ] = "llama_cpp",
    weights: Annotated[Weights, typer.Option(help="Which GGUF file of the export llama_cpp loads.")] = "f32",
    slots: Annotated[int, typer.Option(help="Replies that are generated side by side.", min=1, max=256)] = 4,
    listen: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 within a container.")] = "127.0.0.1",
    host: Annotated[
        list[str] | None, typer.Option(help="A Host header to answer to, besides localhost:PORT; repeatable.")
    ] = None,
    engine_argument: Annotated[
        list[str] | None, typer.Option(help="An argument of `vllm serve`, such as --dtype=float32; repeatable.")
    ] = None,
    keep_replies: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Keep prompts and replies for so many days in .rlhf/feedback.db, and rated ones longer: for "
            "/v1/feedback. Without it nothing is kept.",
        ),
    ] = None,
    challenger: Annotated[
        str | None, typer.Option(metavar="RUN", help="A second model, which answers --share of the conversations.")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Share of the conversations that the challenger answers; without it 0.1.", min=0, max=1),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer a request with n: 2 with a reply of each model.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="A page for trying the model, at /; with thumbs if replies are kept.")
    ] = False,
    record: Annotated[bool, typer.Option(help="Count the tokens that are served in .rlhf/served.jsonl.")] = True,
) -> None:
    """Serve a model at http://127.0.0.1:PORT/v1 (models, chat/completions, completions), with /health and /metrics,
    until Ctrl-C or SIGTERM; running requests are answered first. Exports the run if needed.
    """
    from config import jsonl
    from config.workspace.kept import kept_params
    from config.workspace.served import SERVED
    from costs.tables.price import usd_per_device_hour
    from serving.account import Account, Price
    from serving.run import serve as serve_exports
    from serving.settings import Settings

    if challenger is None and (compare or share is not None):
        option = "--compare" if compare else "--share"
        raise ParamsError(f"{option} needs a second model. Add --challenger RUN, or leave it out.")
    root = project_root()
    chosen = run or champion_or_last(root)
    params = kept_params(root, run_id_of(root, chosen))
    price = Price(usd_per_device_hour(params), params.tracking.registered_model)
    keep = partial(jsonl.append, root / SERVED) if record else None

    def wanted() -> Path:
        return exported(root, chosen)

    def say(line: str) -> None:
        print(line, flush=True)

    other = None
    if challenger is not None:
        other = Challenger(cache(partial(exported, root, challenger)), 0.1 if share is None else share, compare)
    address = Address(port, listen, tuple(host or ()))
    follow = wanted if chosen == CHAMPION else cache(wanted)
    arguments = tuple(engine_argument or ())
    settings = Settings(engine, weights, slots, os.cpu_count() or 1, arguments)
    serve_exports(root, address, follow, settings, Account(price, keep), say, keep_replies, other, page)
