"""The base model: built from a shape, or read from a folder or a hub."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Positive, Section, Sparse


class Shape(Section):
    """The shape of a model that is built from scratch."""

    place: ClassVar[str]
    """Where it is in params.yaml."""

    family: Literal["llama", "qwen2", "qwen3", "gpt2"] = Field(
        description="Architecture of the random-weight model. qwen3 normalises queries and keys: "
        "small ones learn to compare what stands in two places in half the steps."
    )
    width: Positive = Field(description="Model width d (hidden size).")
    layers: Positive = Field(description="Number of transformer layers.")
    heads: Positive = Field(description="Number of attention heads; must divide the width.")
    kv_heads: Positive = Field(description="Number of key and value heads; must divide the heads.")
    mlp_width: Positive = Field(description="Width of the feed-forward layer.")
    tie_embeddings: bool = Field(description="Share input and output embedding.")
    rope_theta: Annotated[float, Field(gt=1)] = Field(
        description="Base of the rotary positions, usually 1e4: the longest wave in tokens, over "
        "2 pi. With a higher one more dimensions of a head turn slowly. gpt2 has none."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "Shape":
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ParamsError(
                f"{self.place}.width={self.width} does not split into {self.place}.heads={self.heads} of even size. "
                "Change either in params.yaml."
            )
        if self.heads % self.kv_heads:
            raise ParamsError(
                f"{self.place}.kv_heads={self.kv_heads} does not divide "
                f"{self.place}.heads={self.heads}. Change either in params.yaml."
            )
        return self


class RandomModel(Shape):
    """A base model built from its shape, for the embedded default and for benchmarks."""

    place: ClassVar[str] = "model.random"

    vocab_size: Annotated[int, Field(ge=300)] = Field(
        description="Entries of the byte-level BPE tokenizer trained on the data (256 bytes and 4 "
        "special tokens included)."
    )


class Model(Sparse):
    """The base model every stage starts from."""

    path: str | None = Field(
        description="Local folder or Hugging Face model id of the base model; null builds model.random."
    )
    revision: str | None = Field(description="Revision of a hub model; null takes its main branch.")
    random: RandomModel | None = Field(description="Shape of a model built from scratch; null loads model.path.")
    pad_token: str | None = Field(
        description="Token of the vocabulary to pad with, never the end-of-sequence token; null "
        "takes the tokenizer's own."
    )
    template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = Field(
        default=None,
        description="The date, as '2026-01-31', that a chat template gets which asks for today's: "
        "training and serving would otherwise be others at midnight. Such a template is refused "
        "without it.",
    )
    context_length: Annotated[int, Field(ge=8)] = Field(description="Longest prompt plus response, in tokens.")
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        description="Compute type; weights that learn are kept in fp32, and fp16 scales the loss. "
        "fp32 on a CPU: bf16 is slower there without AVX512-BF16."
    )
    quantisation: Literal["nf4"] | None = Field(
        description="Storage of the weights that do not learn: nf4 is 4 bits each (QLoRA), null is the compute type. "
        "Embeddings, norms and heads are never quantised, nor a base built from model.random."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(description="Attention implementation.")

    @model_validator(mode="after")
    def _one_origin(self) -> "Model":
        if (self.path is None) == (self.random is None):
            raise ParamsError(
                f"model.path={self.path} and model.random={'a shape' if self.random else None}: "
                "exactly one of them must be set. Set the other to null in params.yaml."
            )
        return self
