"""The judge of an evaluation: who says which of two replies is better."""

from typing import Annotated, Literal

from pydantic import Field

from config.sections.base import Limit, Positive, Section

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EmbeddingJudgeSettings(Section):
    """Frozen sentence embeddings with a small head, trained on the pairs of data.judge_fraction."""

    kind: Literal["embedding"]
    path: str = Field(description="Local folder of a sentence encoder: rlhf fetch minilm.")


class RewardModelJudgeSettings(Section):
    """Another reward model: a published one, or one trained here on the pairs of data.judge_fraction, the way the
    reward stage trains its own.
    """

    kind: Literal["reward_model"]
    path: str | None = Field(description="Local folder or hub id of a model with one score; null trains one.")


class EndpointJudgeSettings(Section):
    """A model behind an OpenAI-compatible URL. It is asked in both orders."""

    kind: Literal["endpoint"]
    url: str = Field(description="Base URL, such as http://127.0.0.1:8000/v1.")
    model: str = Field(description="Name of the model there.")
    key_variable: str | None = Field(description="Environment variable with the key; null sends none.")
    usd_per_million_prompt_tokens: Price = Field(description="Price of what it reads.")
    usd_per_million_reply_tokens: Price = Field(description="Price of what it writes.")
    max_usd: Limit | None = Field(description="Most that an evaluation may pay it; null is no limit.")
    parallel: Positive = Field(description="Questions at a time.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(description="Of one answer.")


class PeopleJudgeSettings(Section):
    """People who compared the replies themselves: rlhf label --judge, then rlhf run again."""

    kind: Literal["people"]
    path: str = Field(description="Their votes, such as data/judge/votes.jsonl.")
    fewest: Positive = Field(description="Prompts with a vote that a verdict needs.")


Judge = Annotated[
    EmbeddingJudgeSettings | RewardModelJudgeSettings | EndpointJudgeSettings | PeopleJudgeSettings,
    Field(discriminator="kind"),
]
