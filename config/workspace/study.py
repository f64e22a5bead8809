"""A study: runs that differ in a few settings, as a YAML file of the user's; and what came out.

recipe: recipes/demo.yaml
seeds: [1, 2]
variants:
  as it is: []
  half the updates: [ppo.updates=12]
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.errors import ParamsError
from config.yaml_text import yaml_content

MARGIN = 0.02
"""How much lower the quality of a variant may be and still count as the same: of a gold score, or
of a win rate.
"""


class StudyFile(BaseModel):
    """What to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Path
    """Params file that all variants start from, relative to the project."""
    variants: Annotated[dict[str, list[str]], Field(min_length=2)]
    """Name -> `section.key=value` changes; the others are compared with the first."""
    seeds: Annotated[list[int], Field(min_length=1)] = [1]
    margin: Annotated[float, Field(ge=0)] = MARGIN
    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Most that all runs may cost together."""


Verdict = Literal["base", "cheaper and as good", "as good", "worse", "undecided", "not run"]


class VariantResult(BaseModel):
    """One variant: means over its seeds."""

    name: str
    changes: list[str]
    runs: list[str]
    """Ids of its completed runs in the study's folder."""
    verdict: Verdict
    reason: str = ""
    """Why it was not run to its end."""
    planned_usd: float | None = None
    measured_usd: float | None = None
    """Of making the model, stages shared with other variants included."""
    quality: float | None = None
    difference: float | None = None
    """Of its quality to the base's, prompt by prompt, with the interval."""
    difference_low: float | None = None
    difference_high: float | None = None


class StudyResult(BaseModel):
    """The table of a study."""

    judge: Literal["gold", "win rate"]
    margin: float
    variants: list[VariantResult]
    pairs_ranked_right: float | None
    """Share of the pairs whose measured costs differ clearly that the plan ranks the same way."""
    regret: float | None
    """What the cheapest by the plan cost more than the cheapest as measured, of those as good."""
    spent_usd: float


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
        raise ParamsError(
            f"{path}: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}."
        ) from None
