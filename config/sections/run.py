"""Alignment method, evaluation and tracking."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from config.methods.registry import METHODS, RECORDS
from config.sections.base import Positive, Section
from config.sections.judge import Judge

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[METHODS]


class Align(Section):
    """Which method aligns the SFT model."""

    method: MethodName = Field(
        description="Alignment method; names the stage that is run and whose model is evaluated. "
        + " ".join(f"{name}: {method.choice}." for name, method in RECORDS.items())
    )


class Evaluate(Section):
    """Base, SFT and aligned model compared on held-out prompts."""

    prompts: Positive = Field(description="Held-out prompts to answer.")
    max_new_tokens: Positive = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(ge=0)] = Field(description="Sampling temperature; 0 is greedy.")
    batch_size: Positive = Field(description="Responses generated side by side.")
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(description="Level of every interval.")
    samples: Positive = Field(description="Replies shown side by side in the report.")
    judge: Judge | None = Field(
        description="Who judges the replies beside the reward model: {kind: embedding | reward_model | endpoint, "
        "...}; null is nobody. It is judged itself first, on held-out human preferences."
    )


class Tracking(Section):
    """Where MLflow keeps the runs. Never part of a stage's validity."""

    uri: str = Field(description="MLflow tracking URI: a server's URL or a database such as sqlite:///mlflow.db.")
    experiment: str = Field(description="MLflow experiment.")
    registered_model: str = Field(description="Name under which the model is registered.")
    model: Literal["aligned", "student"] = Field(
        description="The model of a run that is registered, promoted, exported and served: the "
        "aligned one, or the student that distill makes of it."
    )
