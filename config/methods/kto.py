"""KTO: Kahneman-Tversky optimisation, on replies that are good or bad, without pairs. training/kto.py trains it.

Source: Ethayarajh et al. 2024 (arXiv:2402.01306).
"""

from typing import Annotated

from pydantic import Field, model_validator

from config.methods.method import Method
from config.sections.base import Positive, splits
from config.sections.offline import Optimisation


class Kto(Optimisation):
    """Kahneman-Tversky optimisation of the SFT model on replies that are good or bad; the sides of pairs are both."""

    beta: Annotated[float, Field(gt=0)] = Field(
        description="Strength of the pull towards the SFT model: a reply's reward is beta times the change of its "
        "log-probability, in nats."
    )
    desirable_weight: Annotated[float, Field(gt=0)] | None = Field(
        description="Weight of a good reply; a bad one weighs 1. null: as many as there are bad replies for a good "
        "one, so that both kinds weigh the same."
    )
    max_length: Positive = Field(description="Prompt plus reply, in tokens; longer replies are dropped and counted.")

    @model_validator(mode="after")
    def _batches(self) -> "Kto":
        splits("kto", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        return self


METHOD = Method(
    settings=Kto,
    summary="SFT, KTO on rated replies; the reward model only judges",
    choice="on replies that are good or bad, without pairs or sampling",
    arxiv="2402.01306",
)
