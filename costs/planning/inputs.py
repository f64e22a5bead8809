"""The numbers that a plan is made of, each under a name: recorded as quantities, or one of them
raised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isfinite
from typing import Any, TypeVar

from pydantic import BaseModel

from costs.quantities import Quantity

R = TypeVar("R")
UNITS = (
    ("flops_per_second", "FLOP/s"),
    ("bytes_per_second", "B/s"),
    ("_per_second", "1/s"),
    ("seconds", "s"),
    ("bytes", "B"),
    ("_tokens", "tokens"),
    ("longest_sft", "tokens"),
    ("longest_preference", "tokens"),
    ("longest_prompt", "tokens"),
    ("longest_pair", "tokens"),
    ("max_length", "tokens"),
    ("watts", "W"),
    ("price.", "USD/h"),
)
"""End of an input's name, or its beginning -> its unit; the rest are counts and shares."""
SHARES = ("workload.loss_tokens", "workload.read_tokens", "workload.attention_places")
"""Of tokens: where they are 1 they are no input."""
MEASURED = ("seconds", "per_second")
"""What a row of a measured table has measured; the rest of it says at which size."""


class Raised(float):
    """An input that has been raised already."""


@dataclass(frozen=True)
class Inputs:
    """What is done to inputs: recorded, or the one called `raised` multiplied by `factor`."""

    raised: str = ""
    factor: float = 1.0

    def number(self, value: Any, name: str, source: str) -> Any:
        """A number under its name; zero, infinity and truth values are no inputs."""
        if isinstance(value, bool | Quantity | Raised) or not value:
            return value
        if not isinstance(value, int | float) or not isfinite(value):
            return value
        if name in SHARES and value == 1:
            return value
        if self.raised:
            return Raised(value * self.factor) if name == self.raised else value
        made = Quantity(value)
        made.name, made.source = name, source
        made.unit = (
            ""
            if name in SHARES
            else next((u for end, u in UNITS if name.endswith(end) or name.startswith(end)), "")
        )
        return made

    def of(self, record: R, name: str, source: str | Callable[[str], str]) -> R:
        """A record with its numbers as inputs, named by their fields below `name`."""
        if is_dataclass(record) and not isinstance(record, type):
            found = {
                each.name: self._value(getattr(record, each.name), _below(name, each.name), source)
                for each in fields(record)
                if each.init
            }
            return replace(record, **found)
        if isinstance(record, BaseModel):
            return record.model_copy(
                update={
                    field: self._value(getattr(record, field), _below(name, field), source)
                    for field in type(record).model_fields
                }
            )
        raise TypeError(f"{type(record).__name__} has no fields")

    def _value(self, value: Any, name: str, source: str | Callable[[str], str]) -> Any:
        if is_dataclass(value) or isinstance(value, BaseModel):
            return self.of(value, name, source)
        if isinstance(value, Mapping):
            return {key: self._value(each, f"{name}.{key}", source) for key, each in value.items()}
        if isinstance(value, list | tuple) and value:
            return type(value)(self._element(each, name, source) for each in value)
        said = source if isinstance(source, str) else source(name)
        return self.number(value, name, said)

    def _element(self, value: Any, name: str, source: str | Callable[[str], str]) -> Any:
        """Of a table: the rates that it has measured are one input, its sizes none."""
        if isinstance(value, tuple) and len(value) == 2:
            key, number = value
            return key, self._value(
                number, f"{name}.{key}" if isinstance(key, str) else name, source
            )
        if isinstance(value, BaseModel):
            return value.model_copy(
                update={
                    field: self._value(getattr(value, field), f"{name}.{field}", source)
                    for field in type(value).model_fields
                    if field.endswith(MEASURED)
                }
            )
        return value


def _below(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
