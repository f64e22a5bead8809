"""Distillation: a small student learns to answer as the aligned model."""

from typing import ClassVar

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Count, Fraction, Positive, Section
from config.sections.model import Shape
from config.sections.online import SamplingLoop


class StudentShape(Shape):
    """A student built from its shape. Its vocabulary is the teacher's."""

    place: ClassVar[str] = "distill.student.random"


class Student(Section):
    """Source of the student's initial weights: exactly one of path, random and layers."""

    path: str | None = Field(description="Local folder or Hugging Face model id; its tokenizer must be the teacher's.")
    revision: str | None = Field(description="Revision of a hub model; null takes its main branch.")
    random: StudentShape | None = Field(description="Shape of a student with random weights, drawn from the seed.")
    layers: Positive | None = Field(
        description="Number of the teacher's own layers to start from, evenly spaced, the first "
        "and the last included; embeddings and head are copied too."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "Student":
        sources = [name for name in ("path", "random", "layers") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ParamsError(
                f"distill.student sets {' and '.join(sources) or 'none'} of path, random and "
                "layers: exactly one of them must be set. Set the others to null in params.yaml."
            )
        return self


class Distill(SamplingLoop):
    """Distillation of the aligned model (teacher) into a student, on responses that either of them samples."""

    method: ClassVar[str] = "distill"

    student: Student = Field(description="Where the student's first weights come from.")
    sft_updates: Count = Field(
        description="Updates at the start that are plain supervised fine-tuning on the teacher's "
        "responses: a student with random weights samples nothing worth learning from."
    )
    lmbda: Fraction = Field(
        description="Share of the prompts that the student answers itself, after sft_updates: 0 "
        "is offline, on the teacher's responses; 1 is on-policy."
    )
    beta: Fraction = Field(
        description="Divergence at each token: 0 is the forward KL (teacher to student), 1 the "
        "reverse KL, between them the generalised Jensen-Shannon divergence."
    )
    distill_epochs: Positive = Field(description="Passes over each batch of responses.")

    @model_validator(mode="after")
    def _adapter_has_a_base(self) -> "Distill":
        if self.lora is not None and self.student.path is None:
            raise ParamsError(
                "distill.lora adapts a pretrained student, and distill.student.path is null. Set "
                "distill.lora: null, or distill.student.path in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _samples_itself(self) -> "Distill":
        if self.rollout_engine == "vllm":
            raise ParamsError(
                "distill.rollout_engine=vllm is for the policy of an alignment method. Set "
                "distill.rollout_engine: static in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _sft_ends(self) -> "Distill":
        if self.sft_updates > self.updates:
            raise ParamsError(
                f"distill.sft_updates={self.sft_updates} is more than "
                f"distill.updates={self.updates}. Change either in params.yaml."
            )
        return self
