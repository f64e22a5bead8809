"""Sources of rows, and how they are cleaned and split."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Count, Fraction, Positive, Section, Sparse


class HelpdeskWorld(Section):
    """A world of the helpdesk family: the same grammar, other words, of this size."""

    seed: int = Field(description="Seed of its words and sentences.")
    items: Annotated[int, Field(ge=2)] = Field(
        description="Items that customers write of; a good reply names the one that was written of."
    )
    problems: Annotated[int, Field(ge=2)] = Field(
        description="Problems an item may have, each with a remedy of its own."
    )
    wordings: Positive = Field(
        description="Ways in which customers tell each problem, greet, and show each mood."
    )
    facts: Count = Field(
        description="Further facts that every prompt tells and a good reply repeats, each after a "
        "word of its own."
    )
    fact_values: Annotated[int, Field(ge=2)] = Field(
        description="Words that the values of facts are made of."
    )
    fact_words: Positive = Field(description="Words of a value.")
    sentence_words: Annotated[int, Field(ge=2)] = Field(
        description="Words of the longest fixed sentence; the shortest has two. With `facts` it "
        "sets the length of replies."
    )
    vocabulary: Positive = Field(
        description="Words of the world at most: items, values of facts and the words of sentences."
    )

    @property
    def named_words(self) -> int:
        """Words with a special meaning, which no sentence uses otherwise: items, values, and the
        words before an item, the order number and each fact.
        """
        return self.items + (self.fact_values + 2 * self.facts if self.facts else 0) + 3

    @model_validator(mode="after")
    def _vocabulary_holds_it(self) -> "HelpdeskWorld":
        least = self.named_words + SENTENCE_VOCABULARY
        if self.vocabulary < least:
            raise ParamsError(
                f"data.source.world.vocabulary={self.vocabulary} is too small for "
                f"world.items={self.items}, world.facts={self.facts} and "
                f"world.fact_values={self.fact_values}: {least} words would do. Change it in "
                "params.yaml."
            )
        sentences = (self.wordings + 1) * self.problems + 3 * self.wordings + 6
        if sentences > SENTENCE_VOCABULARY * SENTENCE_VOCABULARY // 2:
            raise ParamsError(
                f"data.source.world.problems={self.problems} in world.wordings={self.wordings} are "
                f"{sentences} sentences, and at most {SENTENCE_VOCABULARY**2 // 2} can be told "
                "apart. Lower either in params.yaml."
            )
        return self


SENTENCE_VOCABULARY = 24
"""Fewest words to make the sentences of a random world from."""


class HelpdeskSource(Sparse):
    """The embedded customer-support world: generated, seeded, any size, with a known gold score."""

    kind: Literal["helpdesk"]
    sft_rows: Positive = Field(description="Demonstrations to generate (mixed quality).")
    preference_rows: Positive = Field(description="Preference pairs to generate.")
    prompt_rows: Positive = Field(description="Further prompts for PPO and evaluation.")
    temperature: Annotated[float, Field(gt=0)] = Field(
        description="Bradley-Terry temperature of the labels, in units of gold score: P(a wins) = "
        "sigmoid((gold_a - gold_b) / temperature)."
    )
    quality: Fraction = Field(
        description="Probability that a demonstration gets each criterion right; sets the mean "
        "gold score of the SFT data."
    )
    world: HelpdeskWorld | None = Field(
        default=None,
        description="Size and seed of a drawn world; absent is the small one written by hand.",
    )


class FileSource(Section):
    """A local file or URL in one of the known formats."""

    kind: Literal["file"]
    path: str = Field(description="Local path or URL of a jsonl, json, csv or parquet file.")
    format: Literal["pairs", "votes", "trees", "instructions", "prompts"] = Field(
        description="pairs: prompt, chosen, rejected. votes: two responses and several annotators. "
        "trees: ranked replies. "
        "instructions: prompt, completion. prompts: prompt only."
    )
    columns: dict[str, str] = Field(
        description="Our column name -> the file's, where they differ. The votes format takes "
        "annotators as a comma-separated list of columns; "
        "one vote a line, as rlhf label writes them, needs none."
    )

    @property
    def is_url(self) -> bool:
        """Whether the file is on another machine."""
        return "://" in self.path


class HubSource(Section):
    """A Hugging Face dataset."""

    kind: Literal["hub"]
    path: str = Field(description="Dataset id.")
    revision: str = Field(
        description="Revision (commit, tag or branch); pin a commit for repeatable data."
    )
    config: str | None = Field(description="Dataset configuration; null for the default.")
    split: str = Field(description="Split to read.")
    format: Literal["pairs", "votes", "trees", "instructions", "prompts"] = Field(
        description="As for a file source."
    )
    columns: dict[str, str] = Field(
        description="Our column name -> the dataset's, where they differ."
    )


Source = Annotated[HelpdeskSource | FileSource | HubSource, Field(discriminator="kind")]


class Data(Section):
    """Where rows come from and how they are cleaned and split."""

    source: Source = Field(
        description="Preference data; also the demonstrations and prompts where no other source is "
        "named."
    )
    sft_source: Source | None = Field(
        description="Demonstrations; null takes the preferred replies of data.source."
    )
    prompt_source: Source | None = Field(
        description="Prompts for PPO and evaluation; null takes those of data.source."
    )
    vote_source: FileSource | None = Field(
        description="Further preferences, added to those of data.source: the votes of rlhf label. "
        "Lines that are no votes go to quarantine, a file "
        "that is not there yet adds none, and the tokenizer does not learn from them; null adds "
        "none."
    )
    prompt_template: str = Field(
        description="How a plain prompt is put before the model; must contain {prompt}."
    )
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="Share of prompts held out, by a stable hash of the prompt."
    )
    max_prompt_chars: Positive = Field(description="Longer prompts are quarantined.")
    max_response_chars: Positive = Field(description="Longer replies are quarantined.")
    max_quarantine_fraction: Fraction = Field(
        description="More refused rows than this fail the stage."
    )

    def sources(self) -> dict[str, Source]:
        """Setting -> source, of those that are named."""
        named = {
            "source": self.source,
            "sft_source": self.sft_source,
            "prompt_source": self.prompt_source,
            "vote_source": self.vote_source,
        }
        return {setting: source for setting, source in named.items() if source is not None}

    def local_paths(self) -> dict[str, str]:
        """Setting -> path, of the sources that are local files, existing or not."""
        return {
            setting: source.path
            for setting, source in self.sources().items()
            if isinstance(source, FileSource) and not source.is_url
        }

    def urls(self) -> dict[str, str]:
        """Setting -> URL, of the sources that are URLs."""
        return {
            setting: source.path
            for setting, source in self.sources().items()
            if isinstance(source, FileSource) and source.is_url
        }

    def reads_elsewhere(self) -> bool:
        """Whether a source is a URL or a dataset of the hub: it must be read to tell whether it has
        changed.
        """
        hub = any(isinstance(source, HubSource) for source in self.sources().values())
        return hub or bool(self.urls())

    @model_validator(mode="after")
    def _votes(self) -> "Data":
        if self.vote_source is not None and self.vote_source.format not in (
            "votes",
            "pairs",
            "trees",
        ):
            raise ParamsError(
                f"data.vote_source.format={self.vote_source.format} has no preferences, which need "
                "one of votes, pairs, trees. "
                "Change it in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _template(self) -> "Data":
        if self.prompt_template.count("{prompt}") != 1:
            raise ParamsError(
                f"data.prompt_template={self.prompt_template!r} must contain {{prompt}} exactly "
                "once. Change it in params.yaml."
            )
        return self
