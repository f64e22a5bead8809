"""A study: runs that differ in a few settings, as a YAML file of the user's.

recipe: recipes/demo.yaml
seeds: [1, 2]
variants:
  as it is: []
  half the updates: [ppo.updates=12]
"""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from config.errors import ParamsError
from config.yaml_text import yaml_content

MARGIN = 0.02
"""How much lower the quality of a variant may be and still count as the same: of a gold score, or of a win rate."""
Changes = list[str]
"""`section.key=value`, as `--set` has them."""


class StudyFile(BaseModel):
    """What to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Path
    """Params file that all variants start from, relative to the project."""
    variants: Annotated[dict[str, Changes], Field(min_length=2)]
    """Name of a variant -> its changed parameters; the first is the baseline."""
    set: Changes = []
    """Parameters that all variants change."""
    seeds: Annotated[list[int], Field(min_length=1)] = [1]
    margin: Annotated[float, Field(ge=0)] = MARGIN
    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Most that all runs may cost together."""
    growth: dict[str, Annotated[dict[str, float], Field(min_length=2)]] = {}
    """Factor -> variant -> its size: the exponent with which cost grows is fitted."""

    @model_validator(mode="after")
    def _sizes_are_of_variants(self) -> "StudyFile":
        for factor, sizes in self.growth.items():
            for name, size in sizes.items():
                if name not in self.variants:
                    raise ValueError(f"growth.{factor} names {name!r}, which is no variant")
                if size <= 0:
                    raise ValueError(f"growth.{factor}: {name} has size {size:g}; above 0 is one")
        return self


def read_study(path: Path) -> StudyFile:
    """A study's file. Raises ParamsError with what is wrong in it."""
    try:
        return StudyFile.model_validate(yaml_content(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ParamsError(f"{path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise ParamsError(f"{path}: {place}: {message[:1].lower()}{message[1:]}.") from None
