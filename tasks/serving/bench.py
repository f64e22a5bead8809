"""A benchmark of a served model, from the endpoint to the record kept with its run."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil

from config import jsonl
from config.errors import DataError, EnvironmentFault, ModelError, ParamsError, UserError
from config.records import kept_folder
from config.schema import Params
from config.workspace.benchmarked import Benchmark, Limits, Load, keep_benchmark
from config.workspace.kept import kept_params
from config.workspace.login import SERVE_KEY
from costs.planning.serving import ServingPlan, plan_serving
from costs.planning.target import Target as Aim
from costs.planning.target import this_device
from costs.tables.catalogue import own_price
from serving.bench.endpoint import (
    ChatEndpoint,
    api_url,
    is_loopback,
    reply_seconds,
    served_model,
)
from serving.bench.loads import Interrupted, LoadSpec, measure
from serving.bench.measured import knee_of
from serving.bench.pace import pace_seconds
from serving.bench.server import peak_bytes, running
from serving.prompts import Prompts
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
    """The run whose model was served, which keeps the benchmark; None if it is not of this
    project.
    """
    model_digest: str
    """DVC's, empty without a run."""
    interrupted: bool
    plan: ServingPlan | None
    """Of the same loads; None where the server is elsewhere, or not ours."""


OnLoad = Callable[[Load, int], None]
"""Called with each measured load and the number left."""


class Target(NamedTuple):
    """A running server."""

    url: str
    model: str
    key: str | None
    serving: Mapping[str, Any]
    """How a server of ours serves: engine, weights, slots; {} of another."""
    process: psutil.Process | None
    """Of the server that was started for this."""


def bench(
    root: Path, params: Params, settings: BenchSettings, usd_per_hour: float, on_load: OnLoad
) -> BenchResult:
    """Measure every load. Results are kept with the run; a complete benchmark goes to MLflow too.

    Raises EnvironmentFault, UserError or DataError with one line if there is nothing to measure.
    """
    with _target(root, settings) as target:
        run_id = target.model if _is_run(root, target.model) else None
        payloads = _payloads(root, params, settings, run_id)
        _require_pace(target, payloads[0], settings)
        endpoint = ChatEndpoint(target.url, target.model, target.key, timeout_seconds=600.0)
        try:
            _warm(endpoint, payloads)
            loads, peak, paces, interrupted = _measured(
                endpoint, target, settings, payloads, on_load
            )
        finally:
            endpoint.stop()
    found = Benchmark(
        engine=str(target.serving.get("engine", OUTSIDE)),
        weights=str(target.serving.get("weights", "")),
        slots=int(target.serving.get("slots", 0)),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        usd_per_hour=usd_per_hour,
        limits=settings.limits,
        loads=tuple(loads),
        knee=knee_of(loads),
        peak_bytes=peak,
        pace_seconds=mean(paces),
    )
    if run_id is None:
        return BenchResult(found, target.model, target.url, None, "", interrupted, None)
    run_params, digest = kept_params(root, run_id), describe(root, run_id).model_digest
    if loads:
        keep_benchmark(root, run_id, digest, found, is_whole=not interrupted)
        fault = None if interrupted else update_mlflow(root, run_params)
        if fault is not None:
            Display().say(f"warning: {fault}")
    plan = _plan(root, run_params, target, found)
    return BenchResult(found, target.model, target.url, run_id, digest, interrupted, plan)


def _plan(root: Path, params: Params, target: Target, found: Benchmark) -> ServingPlan | None:
    """Planned rates of the measured concurrencies."""
    concurrencies = [each.concurrency for each in found.loads if each.concurrency is not None]
    if found.engine != "llama_cpp" or not is_loopback(target.url):
        return None
    aim = Aim(this_device(root), own_price(found.usd_per_hour, "rlhf bench", found.time), root=root)
    return plan_serving(
        params, aim, found.weights, found.slots, concurrencies, pace_seconds=found.pace_seconds
    )


def _measured(
    endpoint: ChatEndpoint,
    target: Target,
    settings: BenchSettings,
    payloads: Sequence[dict[str, Any]],
    on_load: OnLoad,
) -> tuple[list[Load], int | None, list[float], bool]:
    """The loads, the server's peak memory, the machine's pace between the loads, and whether it was
    interrupted.
    """
    loads: list[Load] = []
    paces = [pace_seconds()]
    with peak_bytes(target.process) as peak:
        try:
            for load in measure(
                endpoint, settings.loads, payloads, settings.seconds, settings.limits
            ):
                if load.failed == load.requests:
                    if not loads:
                        raise EnvironmentFault(
                            f"{target.url}: all {load.requests} requests of the first load failed: "
                            f"{load.fault}."
                        )
                    on_load(load, -1)
                    break
                loads.append(load)
                on_load(load, len(settings.loads) - len(loads))
                paces.append(pace_seconds())
        except (Interrupted, KeyboardInterrupt):
            return loads, peak(), paces, True
    return loads, peak(), paces, False


def _is_run(root: Path, name: str) -> bool:
    try:
        return (kept_folder(root, name) / "dvc.lock").is_file()
    except (UserError, ValueError):
        return False


# ---------------------------------------------------------------- the server


@contextmanager
def _target(root: Path, settings: BenchSettings) -> Iterator[Target]:
    if settings.url is not None:
        url = api_url(settings.url)
        key = os.environ.get(KEY_VARIABLE) or _own_key(root, url)
        name, serving = served_model(url, key, settings.model)
        yield Target(url, name, key, serving, None)
        return
    command = [sys.executable, "-m", "cli.main", "serve", settings.run, "--engine", settings.engine]
    command += ["--weights", settings.weights, "--slots", str(settings.slots), "--no-record"]
    with running(command, root) as (url, process):
        key = _own_key(root, url)
        name, serving = served_model(url, key, None)
        yield Target(url, name, key, serving, process)


def _own_key(root: Path, url: str) -> str | None:
    """The key of this project's own server; it is sent to no other machine."""
    path = root / SERVE_KEY
    return path.read_text(encoding="utf-8") if is_loopback(url) and path.is_file() else None


# ---------------------------------------------------------------- the requests


def _payloads(
    root: Path, params: Params, settings: BenchSettings, run_id: str | None
) -> list[dict[str, Any]]:
    """Requests for replies to the held-out prompts, as the evaluation asks for them. Those that
    leave no room in the context of an exported model are left out.

    Raises DataError if there are none.
    """
    most = settings.max_tokens or params.evaluate.max_new_tokens
    path = root / PREPARED
    if not path.is_file():
        raise DataError(f"{path} does not exist. Prepare data first: rlhf run, or rlhf restore.")
    chats = [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for row in list(jsonl.plain(path))[:MOST_PROMPTS]
        for prompt in [row["prompt"]]
    ]
    reader = _prompts(root, run_id)
    if reader is not None:
        room = reader.context_length - most
        chats = [chat for chat in chats if len(reader.of_chat(chat).ids) <= room]
    if not chats:
        raise ParamsError(
            f"no prompt of {PREPARED} leaves room for {most} tokens in the model's context. Lower "
            "--max-tokens."
        )
    temperature = params.evaluate.temperature
    return [{"messages": chat, "max_tokens": most, "temperature": temperature} for chat in chats]


def _prompts(root: Path, run_id: str | None) -> Prompts | None:
    """The tokenizer of a run's export, where it is in its usual place."""
    if run_id is None:
        return None
    try:
        return Prompts(root / "exports" / run_id)
    except ModelError:
        return None


def _require_pace(target: Target, payload: dict[str, Any], settings: BenchSettings) -> None:
    """Raise EnvironmentFault if a load would not complete a single reply."""
    expected = reply_seconds(target.url, target.model, target.key, payload)
    if expected > settings.seconds:
        raise EnvironmentFault(
            f"{target.url} needs about {expected:.0f} s for a reply of {payload['max_tokens']} "
            f"tokens, and a load lasts {settings.seconds:g} s. Set --seconds to "
            f"{expected * 2:.0f} or more, or lower --max-tokens."
        )


def _warm(endpoint: ChatEndpoint, payloads: Sequence[dict[str, Any]]) -> None:
    for payload in payloads[:WARM_REQUESTS]:
        endpoint.invoke(payload)
