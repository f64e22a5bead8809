"""Settings that all training stages share: adapters and the optimizer."""

from typing import Annotated, Literal

from pydantic import Field

from config.errors import ParamsError
from config.sections.base import Positive, Section


class Lora(Section):
    """Low-rank adapters: the base is frozen; two thin matrices beside each chosen matrix are trained."""

    rank: Positive = Field(
        description="Columns of the thin matrices: rank x (inputs + outputs) weights learn for each chosen matrix."
    )
    alpha: Annotated[float, Field(gt=0)] = Field(description="The adapter's output is scaled by alpha / rank.")
    modules: Annotated[list[str], Field(min_length=1)] = Field(
        description="Matrices of each layer to adapt: q, k, v, o (attention), gate, up, down "
        "(feed-forward), or the model's own names. "
        "Where a model keeps q, k and v in one matrix, any of them means all three."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        description="Dropout before the adapter while training; 0 in ppo."
    )

    def difference(self, other: "Lora") -> str | None:
        """The first setting (rank, alpha or modules) in which two adapters differ, so that neither can start as a copy
        of the other.
        """
        if set(self.modules) != set(other.modules):
            return "modules"
        return next((key for key in ("rank", "alpha") if getattr(self, key) != getattr(other, key)), None)


OptimizerName = Literal["adamw", "adamw8bit"]
OPTIMIZER = "AdamW, or AdamW with 8-bit moments (bitsandbytes): 2 bytes a learning weight instead of 8."
LORA = (
    "Train an adapter on a frozen base; null trains all weights. One that starts from a model with "
    "an adapter begins as its copy, so rank, alpha and modules must be the same."
)


def without_dropout(section: str, lora: Lora | None) -> None:
    """Raise ParamsError for adapters with dropout: the policy in training would differ from the one that sampled."""
    if lora is not None and lora.dropout:
        raise ParamsError(
            f"{section}.lora.dropout={lora.dropout}: with dropout the policy that learns is not the one that "
            f"sampled. Set {section}.lora.dropout: 0.0 in params.yaml."
        )
