"""When the retrain cycle trains, its budget, and the evidence a new champion needs."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Fraction, Limit, Positive, Sparse
from config.sections.data import FileSource


class Retrain(Sparse):
    """When the retrain cycle trains, what it may cost in a month, and the evidence a model needs to replace the
    champion. No stage reads it.
    """

    min_new_rows: Positive = Field(
        description="Rows of the prepared data added or changed since the champion's that are a reason to train."
    )
    max_length_drift: Fraction = Field(
        description="Largest difference of the two distributions of prompt lengths (Kolmogorov-Smirnov), "
        "new rows against the champion's; surely more is a reason to train."
    )
    max_new_words: Fraction = Field(
        description="Share of the words in the prompts of new rows that no prompt of the "
        "champion's data has; surely more is a reason to train."
    )
    max_accuracy_drop: Fraction = Field(
        description="How far below its held-out accuracy the champion's reward model may be on the "
        "new pairs; surely more is a reason to train."
    )
    monthly_usd: Limit | None = Field(
        description="Most that all retrain cycles of a calendar month (UTC) may cost together, in "
        "US dollars; null is no limit."
    )
    max_kl: Limit | None = Field(
        description="Largest KL of a new champion from its SFT model, in nats per response; null is no bound."
    )
    max_length_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        description="Mean response length of a new champion, in characters, over the champion's: "
        "at most this, and at least one over this."
    )
    safety_source: FileSource | None = Field(
        description="Prompts (format prompts) on which a new champion must not be worse; null "
        "checks none, and the gate says so."
    )
    safety_margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="Worse means: the mean score on the safety prompts may have dropped by more than this. "
        "In units of the gold score where it is known, else of the champion's reward model."
    )

    evidence: Literal["contest", "live"] | None = Field(
        default=None,
        description="What a new champion has to show. contest, and null: it wins the contest. live: after that its "
        "replies get more thumbs up than the champion's, beside which it is served (rlhf serve --challenger).",
    )

    @model_validator(mode="after")
    def _safety(self) -> "Retrain":
        if self.safety_source is not None and self.safety_source.format != "prompts":
            raise ParamsError(
                f"retrain.safety_source.format={self.safety_source.format}: safety prompts are of "
                "format prompts. Change it in params.yaml."
            )
        return self
