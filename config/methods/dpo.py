"""DPO: direct preference optimisation, on the preference pairs alone. training/dpo.py trains it.

Source: Rafailov et al. 2023 (arXiv:2305.18290).
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.methods.method import Method
from config.sections.base import Positive, splits
from config.sections.offline import Optimisation


class Dpo(Optimisation):
    """Direct preference optimisation of the SFT model on the preference pairs; neither reward model nor sampling."""

    beta: Annotated[float, Field(gt=0)] = Field(
        description="Strength of the pull towards the SFT model: a pair's margin is beta times the "
        "change of its log-odds, in nats."
    )
    loss: Literal["sigmoid", "robust", "ipo"] = Field(
        description="sigmoid: as published (Rafailov et al. 2023). robust: unbiased when labels are flipped with "
        "probability label_smoothing. ipo: squared distance of the mean log-ratio per token "
        "from 1 / (2 beta)."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        description="Probability that a pair's label is wrong; for loss robust, 0 with the others."
    )
    max_length: Positive = Field(description="Prompt plus reply, in tokens; longer pairs are dropped and counted.")

    @model_validator(mode="after")
    def _batches(self) -> "Dpo":
        splits("dpo", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        if self.label_smoothing and self.loss != "robust":
            raise ParamsError(
                f"dpo.label_smoothing={self.label_smoothing} has no effect with dpo.loss={self.loss}. Set dpo.loss: "
                "robust or dpo.label_smoothing: 0.0 in params.yaml."
            )
        return self


METHOD = Method(
    settings=Dpo,
    summary="SFT, DPO on the pairs; the reward model only judges",
    choice="on the preference pairs alone, without sampling",
    arxiv="2305.18290",
)
