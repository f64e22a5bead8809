"""The plan of serving a model: memory, tokens per second, devices, and the price of a million tokens.

On a CPU, with llama.cpp, a reply costs the server

seconds = front(concurrency, output) + input x prefill x N
              + output x (launch(batch) x L + step(batch) x N) / batch

for N matrix parameters and L layers beyond those of a small model, and a batch of min(concurrency, slots): `front` is
what the small model costs, launch and step come from a deep and a large one. Other CPUs are planned by the rates of
costs/tables/serving.yaml; GPUs by a roofline of prefill and decode (costs/formulas), without the front.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

from config.schema import Params
from config.workspace.benchmarked import Usage
from config.workspace.machine import ServingRates
from costs.formulas.memory import kv_cache_bytes
from costs.formulas.serving import token_price
from costs.formulas.setting import DTYPE_BYTES, Levers, Setting, Workload
from costs.planning.models import base_shape, student_shape
from costs.planning.rows import count
from costs.planning.serving_pace import Lengths, Pace, measured_pace, roofline, serving_rates, usual_rates
from costs.planning.settings import response_tokens
from costs.planning.target import Target
from costs.tables.engines import engine
from costs.tables.shapes import ModelShape

WEIGHT_BYTES = {"f32": 4.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""A parameter in a GGUF file: blocks of 32 share a 16-bit scale. Source: ggml's `quants`."""
BATCH_TOKENS = 512
"""Batch size of llama.cpp's prefill, which has buffers for it."""
UTILISATION = 0.8
"""Planned utilisation of a device: waiting times grow without bound towards 1."""
MONTH_HOURS = 730.0


@dataclass(frozen=True)
class PlannedLoad:
    """A constant number of concurrent requests on one device."""

    concurrency: int
    tokens_per_second: float
    """Output tokens."""
    ttft_seconds: float
    """Time to first token with a free slot."""
    tpot_seconds: float
    usd_per_million_tokens: float
    """Price of input and output tokens together."""
    bound: str
    """The largest part of a reply: front or engine if calibrated, else the bound of decoding (compute, bandwidth,
    launch ...).
    """


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
    calibrated: bool
    slower: float | None
    """Seconds of the machine now over those of its calibration; None if its pace was not given."""
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
    pace_seconds: float | None = None,
) -> ServingPlan:
    """The plan of a server of the run's final model. Without `lengths` those of the held-out prompts and the
    demonstrations. `pace_seconds` is the machine's pace if it is not that of its calibration.

    Raises CostError for what cannot be planned.
    """
    shape, length = served_shape(params, target.root), lengths or data_lengths(params, target.root)
    measured = serving_rates(target.root) if target.hardware.is_cpu else None
    rates = (measured or usual_rates()) if target.hardware.is_cpu else None
    setting = _setting(params, target, shape, slots, length)
    slower = pace_seconds / rates.pace_seconds if rates and pace_seconds else 1.0
    if rates is None:
        pace = roofline(setting, slots)
    else:
        pace = measured_pace(rates, shape, weights, slots, slower)
    context = params.model.context_length
    per_request = kv_cache_bytes(shape, setting.levers.dtype, 1.0, context)
    held = _weight_bytes(setting, weights)
    fixed = held + _beside_bytes(setting, rates, slots, context, length)
    usable = float(target.hardware.usable_bytes)
    usd_per_hour = target.price.expected
    notes = () if measured else _guesses(target)
    return ServingPlan(
        engine="llama_cpp" if target.hardware.is_cpu else "vllm",
        weights=weights if target.hardware.is_cpu else params.model.dtype,
        hardware=target.hardware.name,
        slots=slots,
        lengths=length,
        weight_bytes=held,
        cache_bytes_per_request=per_request,
        peak_bytes=fixed + slots * per_request,
        usable_bytes=usable,
        requests_that_fit=max(0, floor((usable - fixed) / per_request)),
        usd_per_hour=usd_per_hour,
        calibrated=measured is not None,
        slower=slower if measured and pace_seconds else None,
        loads=tuple(_load(pace, concurrency, length, usd_per_hour) for concurrency in concurrencies),
        rate=_rate(pace, requests_per_second, slots, length, usd_per_hour) if requests_per_second else None,
        assumptions=notes,
    )


def served_shape(params: Params, root: Path) -> ModelShape:
    """The shape of the model that a run promotes."""
    teacher = base_shape(params, root)
    return student_shape(params, root, teacher) if params.final_stage == "distill" else teacher


def data_lengths(params: Params, root: Path) -> Lengths:
    """Lengths of held-out prompts, and of replies as long as the demonstrations."""
    rows = count(params, root)
    return Lengths(rows.prompt_tokens, response_tokens(rows, params.evaluate.max_new_tokens))


def cache_bytes(shape: ModelShape) -> float:
    """Keys and values of one token in llama.cpp as it is started here, in fp32."""
    return kv_cache_bytes(shape, "fp32", 1.0, 1.0)


def _weight_bytes(setting: Setting, weights: str) -> float:
    """Norms and other vectors stay in fp32; their size is negligible."""
    bytes_per_weight = WEIGHT_BYTES[weights] if setting.hardware.is_cpu else DTYPE_BYTES[setting.levers.dtype]
    return setting.model.parameters * bytes_per_weight


def buffer_bytes(shape: ModelShape, slots: int, context: int, input_tokens: float) -> float:
    """Bytes of llama.cpp's compute buffers: attention scores and their softmax over every slot's context for the
    tokens that it reads at once, their activations, and the logits of every slot.
    """
    read = min(BATCH_TOKENS, slots * input_tokens)
    scores = 2.0 * shape.heads * slots * context
    return 4.0 * (read * (scores + 3 * shape.mlp_width + 6 * shape.width) + slots * shape.vocab)


def _beside_bytes(setting: Setting, rates: ServingRates | None, slots: int, context: int, length: Lengths) -> float:
    """Memory of a server besides weights and cache: its processes and buffers, or on a GPU the CUDA context and vLLM's
    room for activations.
    """
    if rates is None:
        return setting.engine.context_bytes + VLLM_KEEPS * setting.hardware.usable_bytes
    return rates.process_bytes + buffer_bytes(setting.model, slots, context, length.input)


VLLM_KEEPS = 0.1
"""Its default, gpu_memory_utilization=0.9, leaves so much of a device's memory."""


def _setting(params: Params, target: Target, shape: ModelShape, slots: int, length: Lengths) -> Setting:
    levers = Levers(tuning="frozen", dtype="fp32" if target.hardware.is_cpu else params.model.dtype, micro_batch=slots)
    work = Workload(
        ceil(length.input + length.output), length.input + length.output, 1.0,
        ceil(length.input), ceil(length.output), length.output,
    )  # fmt: skip
    return Setting("serve", shape, levers, work, target.hardware, engine("vllm"))


def _guesses(target: Target) -> tuple[str, ...]:
    if target.hardware.is_cpu:
        return (
            "serving was not measured on this machine, and these are figures of two cores of an "
            "EPYC: rlhf calibrate measures it",
        )
    return (
        "the front and the network are left out; each prompt is read alone",
        f"a tenth of {target.hardware.name}'s memory is left to vLLM's activations and graphs",
    )


# ---------------------------------------------------------------- prices


def _load(pace: Pace, concurrency: int, length: Lengths, usd_per_hour: float) -> PlannedLoad:
    seconds = pace.per_reply(concurrency, length)
    first = pace.first_token(length)
    return PlannedLoad(
        concurrency=concurrency,
        tokens_per_second=length.output / seconds,
        ttft_seconds=first,
        tpot_seconds=max(0.0, concurrency * seconds - first) / max(1.0, length.output - 1),
        usd_per_million_tokens=_usd_per_million(seconds, length, usd_per_hour),
        bound=pace.bound(concurrency, length),
    )


def _usd_per_million(seconds_per_reply: float, length: Lengths, usd_per_hour: float) -> float:
    usage = Usage(
        wall_seconds=seconds_per_reply, busy_seconds=seconds_per_reply,
        input_tokens=length.input, output_tokens=length.output,
    )  # fmt: skip
    return token_price(usage, usd_per_hour, "allocation").blended or 0.0


def _rate(pace: Pace, wanted: float, slots: int, length: Lengths, usd_per_hour: float) -> PlannedRate:
    """Devices so that each is at most UTILISATION of its highest rate; running requests follow from the rate (Little's
    law: concurrency = rate x seconds of a reply).
    """
    most = 1 / pace.per_reply(slots, length)
    devices = max(1, ceil(wanted / (UTILISATION * most)))
    rate_per_device = wanted / devices
    concurrency = _at_work(pace, rate_per_device, slots, length)
    return PlannedRate(
        requests_per_second=wanted,
        devices=devices,
        concurrency=concurrency,
        reply_seconds=concurrency / rate_per_device,
        utilisation=rate_per_device / most,
        usd_per_month=devices * usd_per_hour * MONTH_HOURS,
        usd_per_million_tokens=_usd_per_million(devices / wanted, length, usd_per_hour),
    )


def _at_work(pace: Pace, rate: float, slots: int, length: Lengths) -> float:
    """The concurrency at which a device answers so many requests a second; below 1 it idles between them."""
    alone = pace.per_reply(1, length)
    if rate * alone <= 1:
        return rate * alone
    low, high = 1.0, 1.0 * slots
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rate * pace.per_reply(middle, length) > 1 else (low, middle)
    return high


def as_json(plan: ServingPlan) -> dict[str, Any]:
    """What `rlhf plan serve --json` prints."""
    return {"stage": "serve", "fits": plan.fits, **asdict(plan)}
