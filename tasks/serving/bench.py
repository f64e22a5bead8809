"""A benchmark of a served model, from the endpoint to the record kept with its run."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from config import jsonl
from config.errors import DataError, EnvironmentFault, UserError
from config.records import kept_folder
from config.schema import Params
from config.workspace.benchmarked import Benchmark, Limits, Load, keep_benchmark
from config.workspace.kept import kept_params
from config.workspace.login import SERVE_KEY
from costs.planning.serving import ServingPlan, plan_serving
from costs.planning.target import Target, this_device
from costs.tables.catalogue import own_price
from serving.bench.endpoint import ChatEndpoint, api_url, is_loopback
from serving.bench.loads import Interrupted, LoadSpec, measure
from serving.bench.measured import knee_of
from serving.bench.server import peak_bytes, running
from serving.settings import EngineName, Weights
from tasks.champions.registry import describe, update_mlflow
from tasks.stage.progress import Display

KEY_VARIABLE = "RLHF_SERVE_KEY"
WARM_REQUESTS = 3
MOST_PROMPTS = 2000
PREPARED = Path("data/prepared/prompts/test.jsonl")
OUTSIDE = "endpoint"
"""The engine's name where the server is not ours."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure, and how."""

    run: str
    """What to serve, where no address is given."""
    url: str | None = None
    model: str | None = None
    loads: Sequence[LoadSpec] = ()
    seconds: float = 10.0
    max_tokens: int | None = None
    """None is evaluate.max_new_tokens."""
    limits: Limits = field(default_factory=Limits)
    engine: EngineName = "llama_cpp"
    weights: Weights = "f32"
    slots: int = 4


class BenchResult(NamedTuple):
    """A benchmark, complete or interrupted."""

    benchmark: Benchmark
    model: str
    url: str
    run_id: str | None
    """The run whose model was served, which keeps the benchmark; None if it is not of this project."""
    model_digest: str
    """DVC's, empty without a run."""
    interrupted: bool
    plan: ServingPlan | None
    """Plan of the same loads; None if the server is elsewhere, or not ours."""


OnLoad = Callable[[Load, int], None]
"""Called with each measured load and the number left."""


def bench(root: Path, params: Params, settings: BenchSettings, usd_per_hour: float, on_load: OnLoad) -> BenchResult:
    """Measure every load. Results are kept with the run; a complete benchmark goes to MLflow too.

    Raises EnvironmentFault, UserError or DataError with one line if there is nothing to measure.
    """
    with _running_server(root, settings) as (url, process):
        key = os.environ.get(KEY_VARIABLE) if settings.url else None
        endpoint = ChatEndpoint(url, "", key or _own_key(root, url), timeout_seconds=600.0)
        try:
            model = endpoint.served_model(settings.model)
            payloads = _payloads(root, params, settings)
            _require_time_for_a_reply(endpoint, payloads[0], settings)
            for payload in payloads[:WARM_REQUESTS]:
                endpoint.invoke(payload)
            loads, peak, interrupted = _measured(endpoint, process, settings, payloads, on_load)
        finally:
            endpoint.stop()
    run_id = model.name if _is_run(root, model.name) else None
    benchmark = Benchmark(
        engine=str(model.settings.get("engine", OUTSIDE)),
        weights=str(model.settings.get("weights", "")),
        slots=int(model.settings.get("slots", 0)),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        usd_per_hour=usd_per_hour,
        limits=settings.limits,
        loads=tuple(loads),
        knee=knee_of(loads),
        peak_bytes=peak,
    )
    if run_id is None:
        return BenchResult(benchmark, model.name, url, None, "", interrupted, None)
    run_params, digest = kept_params(root, run_id), describe(root, run_id).model_digest
    if loads:
        keep_benchmark(root, run_id, digest, benchmark, is_whole=not interrupted)
        fault = None if interrupted else update_mlflow(root, run_params)
        if fault is not None:
            Display().say(f"warning: {fault}")
    plan = _plan(root, run_params, url, benchmark)
    return BenchResult(benchmark, model.name, url, run_id, digest, interrupted, plan)


def _plan(root: Path, params: Params, url: str, benchmark: Benchmark) -> ServingPlan | None:
    """Planned rates of the measured concurrencies."""
    concurrencies = [load.concurrency for load in benchmark.loads if load.concurrency is not None]
    if benchmark.engine != "llama_cpp" or not is_loopback(url):
        return None
    target = Target(this_device(root), own_price(benchmark.usd_per_hour, "rlhf bench", benchmark.time), root=root)
    return plan_serving(params, target, benchmark.weights, benchmark.slots, concurrencies)


def _measured(
    endpoint: ChatEndpoint,
    process: psutil.Process | None,
    settings: BenchSettings,
    payloads: Sequence[dict[str, Any]],
    on_load: OnLoad,
) -> tuple[list[Load], int | None, bool]:
    """The loads, the server's peak memory, and whether it was interrupted."""
    loads: list[Load] = []
    with peak_bytes(process) as peak:
        try:
            for load in measure(endpoint, settings.loads, payloads, settings.seconds, settings.limits):
                if load.failed == load.requests:
                    if not loads:
                        raise EnvironmentFault(
                            f"{endpoint.url}: all {load.requests} requests of the first load failed: {load.fault}."
                        )
                    on_load(load, -1)
                    break
                loads.append(load)
                on_load(load, len(settings.loads) - len(loads))
        except (Interrupted, KeyboardInterrupt):
            return loads, peak(), True
    return loads, peak(), False


def _is_run(root: Path, name: str) -> bool:
    try:
        return (kept_folder(root, name) / "dvc.lock").is_file()
    except (UserError, ValueError):
        return False


# ---------------------------------------------------------------- the server


@contextmanager
def _running_server(root: Path, settings: BenchSettings) -> Iterator[tuple[str, psutil.Process | None]]:
    """Address of the API, and the process that was started for this."""
    if settings.url is not None:
        yield api_url(settings.url), None
        return
    command = [sys.executable, "-m", "cli.main", "serve", settings.run, "--engine", settings.engine]
    command += ["--weights", settings.weights, "--slots", str(settings.slots), "--no-record"]
    with running(command, root) as served:
        yield served


def _own_key(root: Path, url: str) -> str | None:
    """The key of this project's own server; it is sent to no other machine."""
    path = root / SERVE_KEY
    return path.read_text(encoding="utf-8") if is_loopback(url) and path.is_file() else None


# ---------------------------------------------------------------- the requests


def _payloads(root: Path, params: Params, settings: BenchSettings) -> list[dict[str, Any]]:
    """Requests for replies to the held-out prompts, as the evaluation asks for them.

    Raises DataError if there are none.
    """
    most = settings.max_tokens or params.evaluate.max_new_tokens
    path = root / PREPARED
    if not path.is_file():
        raise DataError(f"{path} does not exist. Prepare data first: rlhf run, or rlhf restore.")
    prompts = [row["prompt"] for row in islice(jsonl.plain(path), MOST_PROMPTS)]
    settings_of_all = {"max_tokens": most, "temperature": params.evaluate.temperature}
    return [
        {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, **settings_of_all}
        for prompt in prompts
    ]


def _require_time_for_a_reply(endpoint: ChatEndpoint, payload: dict[str, Any], settings: BenchSettings) -> None:
    """Raise EnvironmentFault if a load would not complete a single reply."""
    expected = endpoint.reply_seconds(payload)
    if expected > settings.seconds:
        raise EnvironmentFault(
            f"{endpoint.url} needs about {expected:.0f} s for a reply of {payload['max_tokens']} "
            f"tokens, and a load lasts {settings.seconds:g} s. Set --seconds to "
            f"{expected * 2:.0f} or more, or lower --max-tokens."
        )
