"""The three tables of the planner: devices, prices, named model shapes. Whatever is not in them is
an error that says where to add it.

Sources: hardware.yaml, prices.yaml and shapes.yaml beside this file, each row with its own source
and date.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from config.errors import CostError
from costs.tables.measured import Measured
from costs.tables.shapes import ModelShape, from_config

_FOLDER = Path(__file__).parent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
GIB = 2**30
HIGHEST_PRICE = 1000.0
"""US dollars per device-hour above which a price is taken for a mistake; the schema of params.yaml
has the same bound.
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
    measured: Measured | None = None
    """This machine's own rates, where it was calibrated and is a CPU."""

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    def peak(self, dtype: str) -> float:
        """FLOP/s at `dtype`; a 16-bit type that the device lacks runs at its fp32 rate, fp32 uses
        no tensor cores.
        """
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
    content = yaml.load((_FOLDER / name).read_text(encoding="utf-8"), _LOADER)
    return dict(content)


def normalised(name: str) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `a100sxm440`: names are compared without vendor, case, punctuation
    and the unit of memory.
    """
    text = re.sub(r"\([^)]*\)", "", name.lower())
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
    """The device called `name`. Raises CostError if it is not in hardware.yaml."""
    index = _index("hardware.yaml")
    wanted = normalised(name)
    key = index.get(wanted) or next(
        (index[wanted[:-n]] for n in (2, 3) if wanted[:-n] in index and wanted[-n:].isdigit()), None
    )
    if key is None:
        close = difflib.get_close_matches(wanted, index, n=1)
        hint = f"Did you mean {index[close[0]]}? " if close else ""
        raise CostError(
            f"device {name!r} is not known. {hint}Known: {', '.join(_table('hardware.yaml'))}. Add "
            "a row to costs/tables/hardware.yaml."
        )
    return hardware_row(key, _table("hardware.yaml")[key])


def hardware_row(name: str, row: Mapping[str, Any], measured: Measured | None = None) -> Hardware:
    """A device from a row of hardware.yaml, or one measured elsewhere."""
    missing = [
        field
        for field in (
            "memory_gib",
            "fp32_tflops",
            "bandwidth_gb_per_second",
            "watts",
            "source",
            "date",
        )
        if not row.get(field)
    ]
    if missing:
        raise CostError(
            f"device row {name} has no {missing[0]}. Complete it in costs/tables/hardware.yaml."
        )
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
        measured=measured,
    )


def price(name: str) -> Price:
    """The price of the device called `name`. Raises CostError if there is none, or none that can be
    believed.
    """
    rows = _table("prices.yaml")
    if name not in rows:
        raise CostError(
            f"device {name} has no price. Add low, expected, high, source and date to "
            "costs/tables/prices.yaml, or give --usd-per-gpu-hour."
        )
    return price_row(name, rows[name])


def price_row(name: str, row: Mapping[str, Any]) -> Price:
    """A checked price: positive, ordered, below HIGHEST_PRICE, with source and date."""
    for field in ("low", "expected", "high"):
        value = row.get(field)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= HIGHEST_PRICE
        ):
            raise CostError(
                f"price {field}={value} of {name} must be above 0 and at most {HIGHEST_PRICE:g} "
                "USD per device-hour. "
                "Change it in costs/tables/prices.yaml."
            )
    if not row["low"] <= row["expected"] <= row["high"]:
        raise CostError(
            f"prices of {name} must be ordered low <= expected <= high, not {row['low']}, "
            f"{row['expected']}, {row['high']}. "
            "Change them in costs/tables/prices.yaml."
        )
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(row.get("date", ""))):
        raise CostError(
            f"price date={row.get('date')!r} of {name} must be the day it was read, YYYY-MM-DD. "
            "Change it in costs/tables/prices.yaml."
        )
    if not row.get("source"):
        raise CostError(
            f"price of {name} has no source. Say in costs/tables/prices.yaml where it was read."
        )
    return Price(
        float(row["low"]),
        float(row["expected"]),
        float(row["high"]),
        str(row["source"]),
        str(row["date"]),
    )


def own_price(usd_per_device_hour: float, source: str, date: str) -> Price:
    """The one price of the user's own hardware."""
    if not 0 < usd_per_device_hour <= HIGHEST_PRICE:
        raise CostError(
            f"a price of {usd_per_device_hour} USD per device-hour must be above 0 and at most "
            f"{HIGHEST_PRICE:g}. "
            "Change prices.usd_per_device_hour in params.yaml, or --usd-per-gpu-hour."
        )
    return Price(usd_per_device_hour, usd_per_device_hour, usd_per_device_hour, source, date)


def known_hardware() -> list[str]:
    return list(_table("hardware.yaml"))


def known_shapes() -> list[str]:
    return list(_table("shapes.yaml"))


def shape(name: str) -> ModelShape:
    """The named shape; organisation, case and punctuation do not matter. Raises CostError if it is
    not in shapes.yaml.
    """
    index = _index("shapes.yaml")
    wanted = normalised(name.rsplit("/", 1)[-1])
    key = index.get(wanted)
    if key is None:
        close = difflib.get_close_matches(wanted, index, n=1)
        hint = f"Did you mean {index[close[0]]}? " if close else ""
        raise CostError(
            f"model {name!r} is not a known shape. {hint}"
            "Add its config.json fields to costs/tables/shapes.yaml, or name a folder that holds "
            "its config.json."
        )
    return from_config(_table("shapes.yaml")[key], key)
