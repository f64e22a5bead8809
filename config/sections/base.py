"""The base of every section: no field has a default, unknown keys and silent conversions are refused."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer

from config.errors import ParamsError


class Section(BaseModel):
    """A frozen part of params.yaml: unknown keys and silent conversions are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sparse(Section):
    """A section whose keys with a default may be absent: None stands for them, and is not written."""

    @model_serializer(mode="wrap")
    def _present(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in write(self).items() if value is not None or fields[key].is_required()}


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1)]
FunctionPath = Annotated[str, Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$")]
"""A Python file and a function in it: path/file.py:function."""


def splits(section: str, batch_name: str, batch: int, part_name: str, part: int) -> None:
    """Refuse a batch that does not divide evenly; raises ParamsError naming both."""
    if batch % part:
        raise ParamsError(
            f"{section}.{batch_name}={batch} does not split into {section}.{part_name}={part}. "
            "Change either in params.yaml."
        )
