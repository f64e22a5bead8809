"""`rlhf bench`: how fast a served model is under load, and what a million tokens cost."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.export import champion_or_last
from cli.project import project_root
from config.errors import EXIT_INTERRUPTED
from serving.settings import EngineName, Weights

if TYPE_CHECKING:
    from config.workspace.benchmarked import Load
    from serving.bench.loads import LoadSpec
    from tasks.serving.bench import BenchResult

CONCURRENCIES = "1,2,4,8,16"


def bench(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="An OpenAI-compatible API, such as http://127.0.0.1:8000/v1; its key is in "
            "RLHF_SERVE_KEY. Without it, a server of --run is started for the benchmark.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="A run by its id, last, last-1, ..., or champion; the champion if there is one, else the last run."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With URL: which model, if it serves several.")] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Concurrent requests, one load each; '' for none.")
    ] = CONCURRENCIES,
    rate: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="Requests arriving per second, one load each, however many are unanswered."
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(help="Of each load.", min=1.0)] = 10.0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest reply; without it, evaluate.max_new_tokens.", min=1)
    ] = None,
    ttft_ms: Annotated[
        float, typer.Option(help="Goodput counts replies whose first token comes by then.", min=0)
    ] = 1000.0,
    tpot_ms: Annotated[
        float, typer.Option(help="... and whose other tokens take at most so long each.", min=0)
    ] = 100.0,
    engine: Annotated[EngineName, typer.Option(help="Of the server that is started.")] = "llama_cpp",
    weights: Annotated[Weights, typer.Option(help="Of the server that is started.")] = "f32",
    slots: Annotated[int, typer.Option(help="Replies that it generates side by side.", min=1, max=256)] = 16,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="What the server costs; without it, the price in params.yaml.", min=0)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for programs instead of a table.")
    ] = False,
) -> None:
    """Measure an OpenAI-compatible endpoint under load, with the held-out prompts: latencies, tokens a second, and
    what a million tokens cost. Ctrl-C keeps the loads that were measured.
    """
    root = project_root()
    from config.load import load
    from config.workspace.benchmarked import Limits
    from costs.tables.price import usd_per_device_hour
    from tasks.serving.bench import BenchSettings, bench

    params = load(root / "params.yaml")
    price = usd_per_device_hour(params) if usd_per_hour is None else usd_per_hour
    loads = _loads(concurrency, rate)
    settings = BenchSettings(
        run or ("" if url else champion_or_last(root)),
        url, model, loads, seconds, max_tokens, Limits(ttft_ms=ttft_ms, tpot_ms=tpot_ms), engine,
        weights, slots,
    )  # fmt: skip

    def on_load(load: "Load", remaining: int) -> None:
        print(_line(load, remaining, seconds, price), file=sys.stderr, flush=True)

    result = bench(root, params, settings, price, on_load)
    if as_json:
        typer.echo(json.dumps(as_record(result), indent=2))
    elif result.benchmark.loads:
        _show(result)
    if result.interrupted:
        print("rlhf: stopped; the loads above were measured to their end.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)


def _loads(concurrency: str, rate: str) -> "list[LoadSpec]":
    """The loads that the options ask for. Raises ParamsError."""
    from config.errors import ParamsError
    from serving.bench.loads import LoadSpec

    specs = [
        *(LoadSpec(concurrency=int(n)) for n in _numbers("--concurrency", concurrency, 1, 1024, int)),
        *(LoadSpec(requests_per_second=n) for n in _numbers("--rate", rate, 0.01, 1000, float)),
    ]
    if not specs:
        raise ParamsError("there is no load to measure: give --concurrency or --rate.")
    return specs


def _numbers(option: str, text: str, low: float, high: float, kind: type) -> list[Any]:
    from config.errors import ParamsError

    numbers = []
    for word in (item.strip() for item in text.split(",") if item.strip()):
        try:
            value = kind(word)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            name = "whole numbers" if kind is int else "numbers"
            raise ParamsError(
                f"{option}={word} is out of range: {name} from {low:g} to {high:g}, separated by commas."
            )
        numbers.append(value)
    return sorted(set(numbers))


def _line(load: "Load", remaining: int, seconds: float, usd_per_hour: float) -> str:
    """One line per load, printed as soon as it is measured."""
    name = (
        f"concurrency {load.concurrency}"
        if load.concurrency is not None
        else f"{load.requests_per_second:g} requests/s"
    )
    if remaining < 0:
        return f"{name}: all {load.requests} requests failed ({load.fault}); the rest is left out"
    rest = f"; {remaining * seconds:.0f} s left" if remaining else ""
    spent = usd_per_hour * load.seconds / 3600
    return f"{name}: {load.tokens_per_second:.0f} tokens/s, ${spent:.5f}{rest}"


def as_record(result: "BenchResult") -> dict[str, Any]:
    """The JSON that `--json` prints."""
    from costs.formulas.serving import BASES, price_of

    benchmark = result.benchmark
    planned = {load.concurrency: load for load in result.plan.loads} if result.plan else {}
    loads = []
    for load in benchmark.loads:
        plan = planned.get(load.concurrency or 0)
        price = {basis: price_of(benchmark, load, basis)._asdict() for basis in BASES}
        loads.append(
            load.model_dump(mode="json")
            | {
                "usd_per_million_tokens": price["allocation"]["blended"],
                "price": price,
                "planned_tokens_per_second": plan.tokens_per_second if plan else None,
            }
        )
    return {
        "model": result.model,
        "url": result.url,
        "run_id": result.run_id,
        **benchmark.model_dump(mode="json"),
        "loads": loads,
        "planned_peak_bytes": result.plan.peak_bytes if result.plan else None,
        "interrupted": result.interrupted,
    }


def _show(result: "BenchResult") -> None:
    from cli.tables.bench import bench_view
    from cli.terminal import Terminal

    Terminal(soft_wrap=False).print(bench_view(result.benchmark, result.model, result.plan))
