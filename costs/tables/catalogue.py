"""The three tables of the planner: devices, prices, named model shapes. Unknown names are errors that say where to add
them.

Sources: hardware.yaml, prices.yaml and shapes.yaml beside this file, each row with its own source and date.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config.errors import CostError
from config.records import TimedRow
from config.terminal_text import shown
from config.yaml_text import yaml_content
from costs.tables.shapes import ModelShape, from_config

_FOLDER = Path(__file__).parent
GIB = 2**30
HIGHEST_PRICE = 1000.0
"""US dollars per device-hour above which a price is taken for a mistake; the schema of params.yaml has the same
bound.
"""


@dataclass(frozen=True)
class Hardware:
    """One device. Rates are per second; peaks are dense and in FLOP/s."""

    name: str
    memory_bytes: float
    usable_bytes: float
    peak_flops_per_second: tuple[tuple[str, float], ...]
    """(dtype, rate) for the dtypes that the device can multiply."""
    bandwidth_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    watts: float
    source: str
    date: str
    attainable: float = 0.87
    """Share of the 16-bit peak that the best large matrix product reaches."""
    timed: tuple[TimedRow, ...] = ()
    """What stages took on it."""

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def generation(self) -> str:
        """The architecture, by the longest start of the name that fits; the name itself where none does."""
        if self.is_cpu:
            return "cpu"
        fits = [start for start in GENERATIONS if self.name.startswith(start)]
        return GENERATIONS[max(fits, key=len)] if fits else self.name

    def peak(self, dtype: str) -> float:
        """FLOP/s at `dtype`; a 16-bit type that the device lacks runs at its fp32 rate, fp32 uses no tensor cores."""
        peaks = dict(self.peak_flops_per_second)
        return peaks.get(dtype) or peaks["fp32"]


@dataclass(frozen=True)
class Price:
    """US dollars per device-hour."""

    low: float
    expected: float
    high: float
    source: str
    date: str


@cache
def _table(name: str) -> dict[str, Any]:
    content = yaml_content((_FOLDER / name).read_text(encoding="utf-8"))
    return dict(content)


_MEMORY_KIND = re.compile(r"\b(hbm\d?e?|gddr\d?x?|memory|vram|gpus?|cards?|devices?)\b")


def normalised(name: str) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `a100sxm440`: names are compared without vendor, case, punctuation and the unit of
    memory.
    """
    # a size in brackets is one all the same, and the kind of memory is none
    text = re.sub(r"\((\d+\s*gi?b)\)", r" \1 ", name.lower())
    text = _MEMORY_KIND.sub(" ", re.sub(r"\([^)]*\)", "", text.replace("_", " ")))
    text = re.sub(r"\b(nvidia|geforce|tesla|graphics)\b", "", text)
    text = re.sub(r"(\d)\s*(gb|gib)\b|([-_ ]\d+)g\b", r"\1\3", text)
    return re.sub(r"[^a-z0-9.]", "", text)


@cache
def _index(name: str) -> dict[str, str]:
    index: dict[str, str] = {}
    for key, row in _table(name).items():
        for alias in [key, *row.get("also", [])]:
            index[normalised(str(alias))] = key
    return index


def hardware(name: str) -> Hardware:
    """The device called `name`. Raises CostError if it is not in hardware.yaml, or not with the memory that the name
    says.
    """
    index, wanted = _index("hardware.yaml"), normalised(name)
    key = index.get(wanted) or _with_memory(wanted, index)
    if key is None:
        close = difflib.get_close_matches(wanted, index, n=3, cutoff=0.4)
        hint = f"Did you mean {', '.join(dict.fromkeys(index[c] for c in close))}? " if close else ""
        raise CostError(
            f"device {shown(name)} is not known. {hint}Known: {', '.join(_table('hardware.yaml'))}. Add "
            "a row to costs/tables/hardware.yaml."
        )
    return hardware_row(key, _table("hardware.yaml")[key])


def _with_memory(wanted: str, index: Mapping[str, str]) -> str | None:
    """The row whose memory is the number at the end of the name (RTX4090-24GB), or at the end of one of its parts
    (H100-80GB-HBM3).
    """
    for digits in range(3, 0, -1):
        rest, size = wanted[:-digits], wanted[-digits:]
        if size.isdigit() and size[0] != "0" and rest in index:
            key = index[rest]
            rows = _table("hardware.yaml")
            same = [name for name in {key, *rows} if name.split("-")[0] == key.split("-")[0]]
            fits = [
                name
                for name in sorted(same, key=lambda name: name != key)
                if round(rows[name]["memory_gib"]) == int(size)
            ]
            return fits[0] if fits else None
    return None


def hardware_row(name: str, row: Mapping[str, Any]) -> Hardware:
    """A device from a row of hardware.yaml, or one measured elsewhere."""
    missing = [
        field
        for field in ("memory_gib", "fp32_tflops", "bandwidth_gb_per_second", "watts", "source", "date")
        if not row.get(field)
    ]
    if missing:
        raise CostError(f"device row {name} has no {missing[0]}. Complete it in costs/tables/hardware.yaml.")
    peaks = tuple(
        (dtype, row[f"{dtype}_tflops"] * 1e12)
        for dtype in ("fp32", "tf32", "fp16", "bf16", "int8")
        if row.get(f"{dtype}_tflops")
    )
    return Hardware(
        name=name,
        memory_bytes=row["memory_gib"] * GIB,
        usable_bytes=row.get("usable_gib", row["memory_gib"]) * GIB,
        peak_flops_per_second=peaks,
        bandwidth_bytes_per_second=row["bandwidth_gb_per_second"] * 1e9,
        link_bytes_per_second=row.get("link_gb_per_second", 10) * 1e9,
        network_bytes_per_second=row.get("network_gb_per_second", 1) * 1e9,
        watts=row["watts"],
        source=row["source"],
        date=row["date"],
        attainable=row.get("attainable", 0.87),
    )


def price(name: str) -> Price:
    """The price of the device called `name`. Raises CostError if there is none, or none that can be believed."""
    rows = _table("prices.yaml")
    if name not in rows:
        raise CostError(
            f"device {name} has no price. Add low, expected, high, source and date to "
            "costs/tables/prices.yaml, or give --usd-per-gpu-hour."
        )
    return price_row(name, rows[name])


def price_row(name: str, row: Mapping[str, Any]) -> Price:
    """Validate a price: positive, ordered, below HIGHEST_PRICE, with source and date."""
    for field in ("low", "expected", "high"):
        value = row.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= HIGHEST_PRICE:
            raise CostError(
                f"price {field}={value} of {name} must be above 0 and at most {HIGHEST_PRICE:g} USD per device-hour. "
                "Change it in costs/tables/prices.yaml."
            )
    if not row["low"] <= row["expected"] <= row["high"]:
        raise CostError(
            f"prices of {name} must be ordered low <= expected <= high, not {row['low']}, {row['expected']}, "
            f"{row['high']}. Change them in costs/tables/prices.yaml."
        )
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(row.get("date", ""))):
        raise CostError(
            f"price date={row.get('date')!r} of {name} must be the day it was read, YYYY-MM-DD. "
            "Change it in costs/tables/prices.yaml."
        )
    if not row.get("source"):
        raise CostError(f"price of {name} has no source. Say in costs/tables/prices.yaml where it was read.")
    return Price(float(row["low"]), float(row["expected"]), float(row["high"]), str(row["source"]), str(row["date"]))


def own_price(usd_per_device_hour: float, source: str, date: str) -> Price:
    """The one price of the user's own hardware."""
    if not 0 < usd_per_device_hour <= HIGHEST_PRICE:
        raise CostError(
            f"a price of {usd_per_device_hour} USD per device-hour must be above 0 and at most {HIGHEST_PRICE:g}. "
            "Change prices.usd_per_device_hour in params.yaml, or --usd-per-gpu-hour."
        )
    return Price(usd_per_device_hour, usd_per_device_hour, usd_per_device_hour, source, date)


GENERATIONS = {"v100": "volta", "titan-rtx": "turing", "rtx20": "turing", "t4": "turing",
               "a100": "ampere", "a800": "ampere", "a10": "ampere", "a30": "ampere",
               "a40": "ampere", "a5000": "ampere", "a6000-ada": "ada", "a6000": "ampere",
               "rtx30": "ampere", "rtx40": "ada", "l4": "ada", "l2": "ada", "h": "hopper",
               "gh200": "hopper", "b": "blackwell", "gb200": "blackwell",
               "rtx50": "blackwell"}  # fmt: skip
"""Start of a device's name -> its architecture."""


_SUFFIXES = re.compile(
    r"[-_ ]*(?:\b(?:chat|instruct|base|it|hf|sft|dpo|rlhf|aligned|ppo|reward(?:[-_ ]model)?|rm|"
    r"model|actor|critic|policy|pretrained|fp16|bf16|float16|4bit|8bit|bnb|gptq|awq|int4|int8|"
    r"fp8|unsloth|v\d(?:\.\d+)*|\d+k|preview|cased|uncased)\b)"
)


def model_name(name: str) -> str:
    """A model's name without what does not change its shape: `Qwen/Qwen2-72B-Instruct` -> `qwen272b`, `OPT-350M reward
    model` -> `opt350m`, `qwen-1_8b-chat` -> `qwen1.8b`.
    """
    text = re.sub(r"\([^)]*\)", "", name).strip().rsplit("/", 1)[-1].lower()
    text = re.sub(r"(?<=\d)_(?=\d)", ".", text)
    text = re.sub(r"(\d)p(\d+)b\b", r"\1.\2b", text).replace("llama v2", "llama-2")
    return normalised(_SUFFIXES.sub("", text))


@cache
def _models() -> dict[str, str]:
    index: dict[str, str] = {}
    for key, row in _table("shapes.yaml").items():
        for alias in [key, *row.get("also", [])]:
            index.setdefault(model_name(str(alias)), key)
            index[normalised(str(alias))] = key
    return index


def shape(name: str) -> ModelShape:
    """The named shape; organisation, case, punctuation, and the words of further training (chat, instruct) do not
    matter. Raises CostError if it is not in shapes.yaml.
    """
    index = _models()
    plain = re.sub(r"\([^)]*\)", "", name).strip().rsplit("/", 1)[-1]
    key = index.get(normalised(plain)) or index.get(model_name(name))
    if key is None:
        close = difflib.get_close_matches(model_name(name), index, n=3)
        hint = f"Did you mean {', '.join(dict.fromkeys(index[c] for c in close))}? " if close else ""
        raise CostError(
            f"model {shown(name)} is not a known shape. {hint}Add its config.json fields to "
            "costs/tables/shapes.yaml, or name a folder that holds its config.json."
        )
    return from_config(_table("shapes.yaml")[key], key)
