"""Calibrates serving on this machine: loads on random models behind the real front and engine."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from config.workspace.benchmarked import Limits, Load
from config.workspace.exported import gguf_path, read_exported
from config.workspace.login import SERVE_KEY
from config.workspace.machine import SERVING_FILE, ServedPoint, ServingRates
from costs.ledger.history import this_machine
from costs.planning.serving import buffer_bytes, cache_bytes
from costs.planning.serving_pace import matrix_parameters
from costs.tables.shapes import ModelShape, from_config
from serving.bench.endpoint import ChatEndpoint
from serving.bench.loads import LoadSpec, measure
from serving.bench.pace import pace_seconds
from serving.bench.server import peak_bytes, running
from serving.settings import Weights

SLOTS = 16
CONCURRENCIES = (1, 4, 16)
SHORT, LONG = 16, 40
"""Tokens of every reply."""
SHORT_PROMPT, LONG_PROMPT = 5, 60
"""Words of a prompt."""
PROMPTS = 200
"""Enough that no prompt is still in the engine's cache when it comes again."""
SMALL_SECONDS, LARGE_SECONDS = 2.0, 3.0
WORDS = ("hello", "my", "kettle", "is", "cracked", "please", "refund", "it", "cost", "too", "much")


class CalibrationLoad(NamedTuple):
    """A load: words of a prompt, tokens of a reply, running requests, seconds."""

    words: int
    tokens: int
    concurrency: int
    seconds: float


def calibrate_serving(root: Path, say: Callable[[str], None]) -> None:
    """Write .rlhf/serving.yaml. Raises EnvironmentFault if a server does not start."""
    content = yaml.safe_dump(measured_rates(root, say).model_dump(mode="json"), sort_keys=False)
    write_atomically(root / SERVING_FILE, content)


def measured_rates(root: Path, say: Callable[[str], None]) -> ServingRates:
    """Serve models with random weights, and measure them. Raises EnvironmentFault."""
    began, pace = time.perf_counter(), pace_seconds()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write_exports(root, folder)

        def points_of(
            model: str, name: str, weights: Weights, loads: Sequence[CalibrationLoad]
        ) -> tuple[list[ServedPoint], int]:
            say(f"serving {model}")
            return _measured(folder / name, weights, loads, pace)

        pairs = [(tokens, n) for tokens in (SHORT, LONG) for n in CONCURRENCIES]
        small_loads = [CalibrationLoad(SHORT_PROMPT, tokens, n, SMALL_SECONDS) for tokens, n in pairs]
        small, held = points_of("a small model", "small", "f32", small_loads)
        deep_loads = [CalibrationLoad(SHORT_PROMPT, LONG, n, SMALL_SECONDS) for n in CONCURRENCIES]
        deep, _ = points_of("a deep model", "deep", "f32", deep_loads)
        large_loads = [CalibrationLoad(SHORT_PROMPT, 24, n, LARGE_SECONDS) for n in CONCURRENCIES]
        large_loads.append(CalibrationLoad(LONG_PROMPT, 4, 1, SMALL_SECONDS))
        kinds: tuple[Weights, ...] = ("f32", "q8_0", "q4_0")
        large = [
            point for kind in kinds for point in points_of(f"a large model in {kind}", "large", kind, large_loads)[0]
        ]
        again, _ = points_of("the small one again", "small", "f32", small_loads)
        shape = _shape(folder / "small")
        weights = gguf_path(folder / "small", "f32").stat().st_size
        context = read_exported(folder / "small").context_length
    longest = max(load.input_tokens for load in small)
    beside = weights + SLOTS * context * cache_bytes(shape)
    beside += buffer_bytes(shape, SLOTS, context, longest)
    return ServingRates(
        processor=this_machine(),
        date=datetime.now(UTC).date().isoformat(),
        pace_seconds=pace,
        small=tuple(_between(first, two) for first, two in zip(small, again, strict=True)),
        deep=tuple(deep),
        large=tuple(large),
        process_bytes=round(held - beside),
        seconds=time.perf_counter() - began,
    )


def _write_exports(root: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "training.calibrate.exports", "--to", str(folder)]
    if subprocess.run(command, cwd=root, check=False, stdout=subprocess.DEVNULL).returncode:
        raise EnvironmentFault("models to serve could not be written; the line above says why.")


def _between(first: ServedPoint, second: ServedPoint) -> ServedPoint:
    """The mean of two points of one load."""
    means = {
        name: (getattr(first, name) + getattr(second, name)) / 2
        for name in ("input_tokens", "output_tokens", "seconds_per_reply", "ttft_seconds")
    }
    return first.model_copy(update=means)


def _shape(folder: Path) -> ModelShape:
    return from_config(json.loads((folder / "config.json").read_text()), folder.name)


def _measured(
    export: Path, weights: Weights, loads: Sequence[CalibrationLoad], pace: float
) -> tuple[list[ServedPoint], int]:
    """A point for each load on a server of an export, as it would be at `pace` of the machine; and the server's peak
    memory.
    """
    shape = _shape(export)
    with _served(export, weights) as (endpoint, peak):
        points, before = [], pace_seconds()
        for spec in loads:
            load, after = _load(endpoint, spec), pace_seconds()
            assert load.ttft_ms is not None
            replies, faster = load.replies_per_second * load.seconds, 2 * pace / (before + after)
            before = after
            points.append(
                ServedPoint(
                    weights=weights,
                    parameters=matrix_parameters(shape),
                    layers=shape.layers,
                    concurrency=spec.concurrency,
                    input_tokens=load.usage.input_tokens / replies,
                    output_tokens=load.usage.output_tokens / replies,
                    seconds_per_reply=faster / load.replies_per_second,
                    ttft_seconds=faster * load.ttft_ms.p50 / 1000,
                )
            )
        return points, peak() or 0


@contextmanager
def _served(export: Path, weights: Weights) -> Iterator[tuple[ChatEndpoint, Callable[[], int | None]]]:
    folder = export.parent
    command = [sys.executable, "-m", "serving", str(export), "--home", str(folder)]
    command += ["--weights", weights, "--slots", str(SLOTS)]
    with running(command, Path.cwd()) as (url, process), peak_bytes(process) as peak:
        key = (folder / SERVE_KEY).read_text(encoding="utf-8")
        endpoint = ChatEndpoint(url, export.name, key, timeout_seconds=60.0)
        try:
            for payload in payloads(CalibrationLoad(SHORT_PROMPT, SHORT, 1, 0.0))[-5:]:  # warm
                endpoint.invoke(payload)
            yield endpoint, peak
        finally:
            endpoint.stop()


def _load(endpoint: ChatEndpoint, spec: CalibrationLoad) -> Load:
    load = next(measure(endpoint, [LoadSpec(spec.concurrency)], payloads(spec), spec.seconds, Limits()))
    if load.failed or load.ttft_ms is None:
        raise EnvironmentFault(
            f"{load.failed} of {load.requests} requests to a server of this machine failed "
            f"({load.fault}). Try rlhf doctor."
        )
    return load


def payloads(spec: CalibrationLoad) -> list[dict[str, Any]]:
    """Requests whose prompts begin differently, so that no engine has read them before."""
    texts = [
        " ".join(WORDS[(place + word * (1 + place % 13)) % len(WORDS)] for word in range(spec.words))
        for place in range(PROMPTS)
    ]
    return [
        {"messages": [{"role": "user", "content": f"{place} {text}"}], "max_tokens": spec.tokens, "temperature": 1.0}
        for place, text in enumerate(texts)
    ]
