"""The plan of serving a model: memory, tokens per second, devices, and the price of a million tokens.

What `rlhf bench` measured of the champion is the plan of serving the same model again. Before that it is a roofline of
reading the prompt and of decoding (costs/formulas), without the front and the network.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

from config.errors import ParamsError
from config.schema import Params
from config.workspace.benchmarked import Benchmark, Load, Usage, read_benchmarked
from config.workspace.champions import read_record
from config.workspace.kept import kept_params
from costs.formulas.compute import decode_step, forward_pass
from costs.formulas.memory import kv_cache_bytes
from costs.formulas.serving import price_of, token_price
from costs.formulas.setting import DTYPE_BYTES, Levers, Setting, Workload
from costs.formulas.time import decode_duration, duration
from costs.planning.models import base_shape, student_shape
from costs.planning.rows import count
from costs.planning.settings import response_tokens
from costs.planning.target import Target
from costs.tables.engines import engine
from costs.tables.shapes import ModelShape

WEIGHT_BYTES = {"f32": 4.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""A parameter in a GGUF file: blocks of 32 share a 16-bit scale. Source: ggml's `quants`."""
BATCH_TOKENS = 512
"""Batch size of llama.cpp's prefill, which has buffers for it."""
PROCESS_BYTES = 96e6
"""Front and llama.cpp beside weights, cache and buffers, on x86-64 Linux (25 November 2026)."""
VLLM_KEEPS = 0.1
"""Its default, gpu_memory_utilization=0.9, leaves so much of a device's memory."""
UTILISATION = 0.8
"""Planned utilisation of a device: waiting times grow without bound towards 1."""
MONTH_HOURS = 730.0


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a request."""

    input: float
    output: float


@dataclass(frozen=True)
class PlannedLoad:
    """A constant number of concurrent requests on one device."""

    concurrency: int
    replies_per_second: float
    tokens_per_second: float
    """Output tokens."""
    ttft_seconds: float
    """Time to first token: planned with a free slot, measured in the median."""
    tpot_seconds: float
    usd_per_million_tokens: float
    """Price of input and output tokens together."""
    bound: str
    """The bound of decoding (compute, bandwidth, launch ...); `measured` for a load of `rlhf bench`."""


@dataclass(frozen=True)
class PlannedRate:
    """A rate of requests, on as few devices as suffice."""

    requests_per_second: float
    devices: int
    concurrency: float
    """Concurrent requests on each device."""
    reply_seconds: float
    utilisation: float
    """Share of the highest rate."""
    usd_per_month: float
    usd_per_million_tokens: float


@dataclass(frozen=True)
class ServingPlan:
    """Bytes are of one device."""

    engine: str
    weights: str
    hardware: str
    slots: int
    lengths: Lengths
    weight_bytes: float
    cache_bytes_per_request: float
    peak_bytes: float
    usable_bytes: float
    requests_that_fit: int
    """Concurrently, each as long as the context."""
    usd_per_hour: float
    loads: tuple[PlannedLoad, ...]
    rate: PlannedRate | None
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


def plan_serving(
    params: Params,
    target: Target,
    weights: str,
    slots: int,
    concurrencies: Sequence[int],
    requests_per_second: float | None = None,
    lengths: Lengths | None = None,
    measured: Benchmark | None = None,
) -> ServingPlan:
    """The plan of a server of the run's final model. Without `lengths` those of the held-out prompts and the
    demonstrations. The loads and the memory of `measured` stand for the formulas', at the price of the target.

    Raises CostError for what cannot be planned.
    """
    shape, length = served_shape(params, target.root), lengths or data_lengths(params, target.root)
    on_cpu, setting = target.hardware.is_cpu, _setting(params, target, shape, slots, length)
    context, usd_per_hour = params.model.context_length, target.price.expected
    per_request = kv_cache_bytes(shape, setting.levers.dtype, 1.0, context)
    stored = WEIGHT_BYTES[weights] if on_cpu else DTYPE_BYTES[setting.levers.dtype]
    held = shape.parameters * stored
    if on_cpu:
        beside = PROCESS_BYTES + buffer_bytes(shape, slots, context, length.input)
    else:
        beside = setting.engine.context_bytes + VLLM_KEEPS * setting.hardware.usable_bytes
    peak, usable = held + beside + slots * per_request, float(target.hardware.usable_bytes)
    priced = measured.model_copy(update={"usd_per_hour": usd_per_hour}) if measured else None
    closed = [load for load in priced.loads if load.concurrency and load.ttft_ms] if priced else []
    if priced is None or not closed:
        loads = [_roofline(setting, stored, n, length, usd_per_hour) for n in concurrencies]
        basis = "a roofline of decoding, without front and network: rlhf bench measures it"
    else:
        loads = [_measured(priced, load) for load in closed]
        basis, peak = f"measured by rlhf bench at {priced.time}", 1.0 * (priced.peak_bytes or peak)
    return ServingPlan(
        engine="llama_cpp" if on_cpu else "vllm",
        weights=weights if on_cpu else params.model.dtype,
        hardware=target.hardware.name,
        slots=slots,
        lengths=length,
        weight_bytes=held,
        cache_bytes_per_request=per_request,
        peak_bytes=peak,
        usable_bytes=usable,
        requests_that_fit=max(0, floor((usable - peak) / per_request) + slots),
        usd_per_hour=usd_per_hour,
        loads=tuple(loads),
        rate=_rate(loads, requests_per_second, length, usd_per_hour) if requests_per_second else None,
        assumptions=(basis,),
    )


def measured_here(root: Path, params: Params, weights: str, slots: int) -> Benchmark | None:
    """What `rlhf bench` measured of the champion, served in this way; None for another model or without it."""
    champion = read_record(root).champion
    benchmarked = read_benchmarked(root, champion.run_id) if champion is not None else None
    if champion is None or benchmarked is None:
        return None
    try:
        made_with = kept_params(root, champion.run_id)
    except ParamsError:
        return None
    if served_shape(made_with, root) != served_shape(params, root):
        return None
    wanted = ("llama_cpp", weights, slots)
    return next((benchmark for benchmark in benchmarked.benchmarks if benchmark.variant == wanted), None)


def served_shape(params: Params, root: Path) -> ModelShape:
    """The shape of the model that a run promotes."""
    teacher = base_shape(params, root)
    return student_shape(params, root, teacher) if params.final_stage == "distill" else teacher


def data_lengths(params: Params, root: Path) -> Lengths:
    """Lengths of held-out prompts, and of replies as long as the demonstrations."""
    rows = count(params, root)
    return Lengths(rows.prompt_tokens, response_tokens(rows, params.evaluate.max_new_tokens))


def buffer_bytes(shape: ModelShape, slots: int, context: int, input_tokens: float) -> float:
    """Bytes of llama.cpp's compute buffers: attention scores and their softmax over every slot's context for the
    tokens that it reads at once, their activations, and the logits of every slot.
    """
    read = min(BATCH_TOKENS, slots * input_tokens)
    scores = 2.0 * shape.heads * slots * context
    return 4.0 * (read * (scores + 3 * shape.mlp_width + 6 * shape.width) + slots * shape.vocab)


def _setting(params: Params, target: Target, shape: ModelShape, slots: int, length: Lengths) -> Setting:
    levers = Levers(tuning="frozen", dtype="fp32" if target.hardware.is_cpu else params.model.dtype, micro_batch=slots)
    work = Workload(
        ceil(length.input + length.output), length.input + length.output, 1.0,
        ceil(length.input), ceil(length.output), length.output,
    )  # fmt: skip
    return Setting("serve", shape, levers, work, target.hardware, engine("vllm"))


# ---------------------------------------------------------------- prices


def _roofline(
    setting: Setting, stored_bytes: float, concurrency: int, length: Lengths, usd_per_hour: float
) -> PlannedLoad:
    """Prefill and decode by costs/formulas, with weights of `stored_bytes` a parameter; each prompt is read alone."""
    shape, levers, batch = setting.model, setting.levers, min(concurrency, setting.levers.micro_batch)
    smaller = stored_bytes / DTYPE_BYTES[levers.dtype]
    read = forward_pass(setting, shape, levers, 1.0, max(1.0, length.input), 1.0)
    step = decode_step(setting, shape, levers, batch, length.input + length.output / 2)
    first = duration(read._replace(weight_bytes=read.weight_bytes * smaller), setting).seconds
    token = decode_duration(step._replace(weight_bytes=step.weight_bytes * smaller), setting)
    seconds = first + length.output * token.seconds / batch
    usage = Usage(wall_seconds=seconds, busy_seconds=seconds, input_tokens=length.input, output_tokens=length.output)
    return PlannedLoad(
        concurrency=concurrency,
        replies_per_second=1 / seconds,
        tokens_per_second=length.output / seconds,
        ttft_seconds=first,
        tpot_seconds=max(0.0, concurrency * seconds - first) / max(1.0, length.output - 1),
        usd_per_million_tokens=token_price(usage, usd_per_hour, "allocation").blended or 0.0,
        bound=token.bound,
    )


def _measured(benchmark: Benchmark, load: Load) -> PlannedLoad:
    assert load.ttft_ms is not None
    assert load.concurrency is not None
    return PlannedLoad(
        concurrency=load.concurrency,
        replies_per_second=load.replies_per_second,
        tokens_per_second=load.tokens_per_second,
        ttft_seconds=load.ttft_ms.p50 / 1000,
        tpot_seconds=load.tpot_ms.p50 / 1000 if load.tpot_ms else 0.0,
        usd_per_million_tokens=price_of(benchmark, load).blended or 0.0,
        bound="measured",
    )


def _rate(loads: Sequence[PlannedLoad], wanted: float, length: Lengths, usd_per_hour: float) -> PlannedRate:
    """Devices so that each is at most UTILISATION of its highest rate. Below the lowest load a device idles between
    replies; else it is at the lowest of the loads that answers as many (Little's law: concurrency = rate x seconds).
    """
    most = max(load.replies_per_second for load in loads)
    devices = max(1, ceil(wanted / (UTILISATION * most)))
    rate = wanted / devices
    at = next(load for load in loads if load.replies_per_second >= rate)
    reply_seconds = at.concurrency / at.replies_per_second
    return PlannedRate(
        requests_per_second=wanted,
        devices=devices,
        concurrency=rate * reply_seconds,
        reply_seconds=reply_seconds,
        utilisation=rate / most,
        usd_per_month=devices * usd_per_hour * MONTH_HOURS,
        usd_per_million_tokens=1e6 * devices * usd_per_hour / 3600 / wanted / (length.input + length.output),
    )


def as_json(plan: ServingPlan) -> dict[str, Any]:
    """What `rlhf plan serve --json` prints."""
    return {"stage": "serve", "fits": plan.fits, **asdict(plan)}
