"""What a measured number is: its quantity, its scale to base units, and what it is counted per."""

import re
from dataclasses import dataclass
from typing import Literal

from costs.published.words import Refused, nearest

Quantity = Literal["memory", "time", "throughput", "fits"]
GIB, GB, MIB = 2**30, 1e9, 2**20

BYTES = {"gib": GIB, "gb": GB, "mib": MIB, "mb": MIB, "bytes": 1.0, "byte": 1.0, "b": 1.0,
         "tb": 1e12, "g": GB, "m": MIB}  # fmt: skip
SECONDS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6,
    "millisecond": 1e-3, "milliseconds": 1e-3, "min": 60.0, "mins": 60.0, "minute": 60.0,
    "minutes": 60.0, "h": 3600.0, "hr": 3600.0, "hrs": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "day": 86400.0, "days": 86400.0,
}  # fmt: skip
ITEMS = {
    **dict.fromkeys(("token", "tokens", "tok", "toks", "tps"), "token"),
    **dict.fromkeys(("sample", "samples", "sequence", "sequences", "seq", "seqs", "sentence",
                     "examples", "example", "rollout", "rollouts", "prompts"), "sample"),
    **dict.fromkeys(("pair", "pairs"), "pair"),
    **dict.fromkeys(("request", "requests", "req", "reqs"), "request"),
    **dict.fromkeys(("step", "steps", "iteration", "iterations", "it", "its", "iter", "iters",
                     "batch", "batches"), "step"),
}  # fmt: skip
GRAMMAR = re.compile(
    r"\b(peak|max|maximum|highest|torch|cuda|memory|mem|usage|ram|vram|gpu|gpus|device|devices|all|"
    r"total|sum|over|each|every|used|use|of|in|the|after|during|per|for|training|inference|logged|"
    r"as|output|generated|generation|decode|decoding|new|throughput|speed|latency|time|wall|clock|"
    r"mean|median|average|avg|actual|measured|reserved|allocated|active|aggregate|system|end|to|"
    r"e2e|end-to-end|and|a|an|on|node|nodes|first|ttft|optimizer|optimiser|update|ppo|grpo|epoch|"
    r"rlhf|model|load|loading|loaded|\d+|bs|seq|batch|size|header|omits|only|reading|consistent|"
    r"with|table|is|number|overall|one|prefill|forward|backward|pass|full|run|whole|job|"
    r"hbm|card|requests?|tokens?|max_memory_allocated|max_memory_reserved|cluster|run|"
    r"peak_memory_usage|both|eval|including|incl|excluding|excl|footprint|consumption)\b"
)


@dataclass(frozen=True)
class Unit:
    """A printed unit."""

    quantity: Quantity
    scale: float = 1.0
    """Base units (bytes, seconds) of one printed unit."""
    item: str = "step"
    """Of time: per step, sample, token, first token, or the whole job. Of throughput: what is
    counted.
    """
    per_device: bool = False
    items: float = 1.0
    """How many items the printed time is for."""
    weights_only: bool = False
    reserved: bool = False
    allocated: bool = False
    """What tensors take, whatever the allocator holds."""
    used: bool = False
    """What the driver counts: with the device's context."""
    over_devices: bool = False
    """The sum over all devices."""
    iterates: bool = False
    """Counts iterations, which some software counts by micro-batches."""
    device_time: bool = False
    """Device-hours: seconds times devices."""


DERIVED = re.compile(
    r"(?<![a-z])(?:mfu|hfu|share|gbps|efficiency|percent|pct|usd|ratio|speedup)(?![a-z])|gb/s|"
    r"max_batch|[%$]|(?:gen|train|model|max)_tflop"
)


def derived(unit: str) -> bool:
    """Whether a number follows from others, or is none of memory, time or throughput."""
    return DERIVED.search(unit.lower()) is not None


def unit_of(printed: str) -> Unit:
    """The meaning of a printed unit: `GiB peak per GPU`, `tokens_per_s_per_gpu`,
    `seconds_for_1024_samples`. Raises Refused with what is not understood.
    """
    text = printed.lower().replace("_", " ").replace("/gpu", " per gpu ").strip()
    text = re.sub(r"\(header omits.*", " per gpu", text)
    if re.search(r"\boom\b|out of memory|\bfits?\b", text):
        return Unit("fits")
    found = _rate(text) or _flops(text) or _memory(text) or _time(text)
    if found is None:
        known = ("GiB", "GB", "MB", "s per step", "hours", "GPU-hours", "tokens/s", "samples/s",
                 "ms per token")  # fmt: skip
        raise Refused([f"unit {printed!r} is not understood{nearest(printed, known)}"])
    unit, rest = found
    left = re.findall(r"[a-z]{2,}", GRAMMAR.sub(" ", re.sub(r"[\d.]+", " 0 ", rest)))
    if left:
        raise Refused(
            f"unit {printed!r}: {word!r} is not understood" for word in dict.fromkeys(left)
        )
    return unit


def _per_device(text: str) -> bool:
    return re.search(r"(?:per|each|a|/) ?(?:gpu|device|card)\b", text) is not None


_COUNT = r"(\d[\d,.]*k?)"


def _items(text: str | None) -> float:
    if not text:
        return 1.0
    plain = text.replace(",", "")
    return float(plain.rstrip("k")) * (1000 if plain.endswith("k") else 1)


def _rate(text: str) -> tuple[Unit, str] | None:
    """tokens/s, samples per second, it/s, rps."""
    names = "|".join(sorted(ITEMS, key=len, reverse=True))
    match = re.search(rf"\b({names})(?: ?/ ?| per )(s|sec|second|min|minute|h|hour|day)\b", text)
    if match is None:
        short = re.search(r"\b(rps|qps|tps|tgs|it/s)\b", text)
        if short is None:
            return None
        item = {"rps": "request", "qps": "request", "it/s": "step"}.get(short[1], "token")
        device = _per_device(text) or short[1] == "tgs"
        return Unit("throughput", 1.0, item, device), text.replace(short[0], " ")
    scale = 1 / SECONDS[match[2]]
    rest = text[: match.start()] + " " + text[match.end() :]
    item = "pair" if re.search(r"\bpairs\b", rest) else ITEMS[match[1]]
    if re.search(r"\b(?:input|prompt|prefill)\b", text):
        item = "input"
    if re.search(r"\btotal tokens|input ?\+ ?output|prompt and output", text):
        item = "any token"
    rest = re.sub(r"\b(?:pairs|input|prompt)\b", " ", rest)
    return Unit("throughput", scale, item, _per_device(text)), rest


def _flops(text: str) -> tuple[Unit, str] | None:
    match = re.search(r"\b([tp])flops?(?:/s|ps| per s(?:ec)?)?\b", text)
    if match is None:
        return None
    scale = 1e12 if match[1] == "t" else 1e15
    return Unit("throughput", scale, "flop", True), text.replace(match[0], " ")


def _memory(text: str) -> tuple[Unit, str] | None:
    match = re.search(r"(?:(?<=\s)|^|(?<=\d))(gib|gb|mib|mb|bytes|tb)\b", text)
    if match is None:
        return None
    scale = BYTES[match[1]]
    logged = re.search(r"logged as gb", text) is not None
    rest = text[: match.start()] + " " + text[match.end() :]
    rest = re.sub(r"logged as gb|\([^)]*(?:fp32|bf16|fp16)[^)]*\)|per-gpu [\d.+]+", " ", rest)
    bare = re.search(r"cuda kernels loaded|after cuda", text) is not None
    rest = rest.replace("kernels", " ")
    weights = re.search(r"model load|load|\bactual\b|weights", text) is not None or (
        "allocated" in text and "max" not in text and "peak" not in text
    )
    rest = rest.replace("weights", " ")
    if logged:
        scale = GIB
    if bare:
        raise Refused(["memory of the bare device context is an input here, not a plan"])
    return Unit(
        "memory",
        scale,
        weights_only=weights,
        reserved=re.search(r"reserved|\bmb used|nvidia-smi", text) is not None,
        allocated=re.search(r"allocated|active", text) is not None,
        used=re.search(r"\bused\b|nvidia-smi", text) is not None,
        over_devices=re.search(r"\bsum\b|over \d+ (?:gpus|devices)|total over", text) is not None,
    ), rest.replace("nvidia-smi", " ")


def _time(text: str) -> tuple[Unit, str] | None:
    names = "|".join(sorted(SECONDS, key=len, reverse=True))
    device = re.search(r"\b(?:gpu|device|a100|h100|v100)[- ](hours?|days?|hrs?)\b", text)
    if device is not None:
        unit = Unit("time", SECONDS[device[1]], "job", device_time=True)
        return unit, text.replace(device[0], " ")
    match = re.search(rf"\b({names})\b", text)
    if match is None:
        return None
    rest = text[: match.start()] + " " + text[match.end() :]
    scale = SECONDS[match[1]]
    if re.search(r"first[- ]token|ttft|prefill", text):
        return Unit("time", scale, "first token"), rest.replace("first-token", " ")
    items = "|".join(sorted(ITEMS, key=len, reverse=True))
    counted = re.search(rf"(?:/|per|for|a|each) ?{_COUNT}? ?(?:ppo |grpo |optimizer |training |"
                        rf"output |decode |generated |rl )?({items})\b", rest)  # fmt: skip
    if counted is None:
        return Unit("time", scale, "job"), rest
    item = ITEMS[counted[2]]
    rest = rest[: counted.start()] + " " + rest[counted.end() :]
    iterates = counted[2].startswith("it")
    return Unit("time", scale, item, items=_items(counted[1]), iterates=iterates), rest
