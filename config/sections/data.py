"""Sources of rows, and how they are cleaned and split."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Count, Fraction, FunctionPath, Positive, Section, Sparse


class HelpdeskWorld(Section):
    """A world of the helpdesk family: the same grammar, other words, of this size."""

    seed: int = Field(description="Seed of its words and sentences.")
    items: Annotated[int, Field(ge=2)] = Field(
        description="Items that customers write of; a good reply names the one that was written of."
    )
    problems: Annotated[int, Field(ge=2)] = Field(
        description="Problems an item may have, each with a remedy of its own."
    )
    wordings: Positive = Field(description="Ways in which customers tell each problem, greet, and show each mood.")
    facts: Count = Field(
        description="Further facts that every prompt tells and a good reply repeats, each after a word of its own."
    )
    fact_values: Annotated[int, Field(ge=2)] = Field(description="Words that the values of facts are made of.")
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
        """Words with a special meaning, which no sentence uses otherwise: items, values, and the words before an item,
        the order number and each fact.
        """
        return self.items + (self.fact_values + 2 * self.facts if self.facts else 0) + 3

    @model_validator(mode="after")
    def _vocabulary_holds_it(self) -> "HelpdeskWorld":
        least = self.named_words + SENTENCE_VOCABULARY
        if self.vocabulary < least:
            raise ParamsError(
                f"data.source.world.vocabulary={self.vocabulary} is too small for world.items={self.items}, "
                f"world.facts={self.facts} and world.fact_values={self.fact_values}: {least} words would do. "
                "Change it in params.yaml."
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
    item_pairs: Fraction = Field(
        default=0.0,
        description="Share of the pairs that are one reply twice, once with the customer's item and "
        "once with another. A reward model learns from them to compare the item with the prompt's.",
    )
    quality: Fraction = Field(
        description="Probability that a demonstration gets each criterion right; sets the mean "
        "gold score of the SFT data."
    )
    world: HelpdeskWorld | None = Field(
        default=None, description="Size and seed of a drawn world; absent is the small one written by hand."
    )


Format = Literal[
    "pairs", "votes", "ranked", "rated", "ratings", "trees", "instructions", "prompts", "nectar", "arena-table",
    "oasst-messages",
]  # fmt: skip
"""The formats of training/preparation/layouts.py."""
NO_PREFERENCES = ("ratings", "instructions", "prompts")

Vote = Literal["index0", "index1", "negative-first", "positive-first"]


class FileSource(Sparse):
    """A local file or URL in one of the known layouts."""

    kind: Literal["file"]
    path: str = Field(
        description="Local path or URL of a jsonl, json, csv or parquet file, also one compressed as .gz or .zst."
    )
    format: Format = Field(
        description="pairs: prompt, chosen, rejected. votes: two responses and who won. ranked: "
        "replies with ranks or scores. rated: a reply and its score. ratings: a reply that is good or "
        "bad, for KTO. trees: conversations with ranked replies. instructions: prompt, completion. "
        "prompts: prompt only. The others are "
        "layouts of published data. rlhf data check recognises all of them: docs/data.md."
    )
    columns: dict[str, str] = Field(
        description="Our column name -> the file's, where they differ. The votes format takes annotators as a "
        "comma-separated list of columns; one vote a line, as rlhf label writes them, needs none."
    )
    vote: Vote | None = Field(
        default=None,
        description="What a winner's number means, where its values do not say it. index0: 0 is "
        "the first response, 1 the second. index1: 1 is the first, 2 the second, 0 a tie. "
        "negative-first, positive-first: the sign says it.",
    )

    @property
    def is_url(self) -> bool:
        """Whether the file is on another machine."""
        return "://" in self.path


class PythonSource(Section):
    """A function of one's own that yields rows in our formats; each is checked like any other."""

    kind: Literal["python"]
    path: FunctionPath = Field(description="File and function, as in readers/mine.py:read. It runs in the data stage.")
    files: list[str] = Field(
        description="Files that the function is called with, as paths; the data stage runs again when they change."
    )

    @property
    def script(self) -> str:
        """The file of the function."""
        return self.path.rpartition(":")[0]


class HubSource(Sparse):
    """A Hugging Face dataset."""

    kind: Literal["hub"]
    path: str = Field(description="Dataset id.")
    revision: str = Field(description="Revision (commit, tag or branch); pin a commit for repeatable data.")
    config: str | None = Field(description="Dataset configuration; null for the default.")
    split: str = Field(description="Split to read.")
    format: Format = Field(description="As for a file source.")
    columns: dict[str, str] = Field(description="Our column name -> the dataset's, where they differ.")
    vote: Vote | None = Field(default=None, description="As for a file source.")


Source = Annotated[HelpdeskSource | FileSource | PythonSource | HubSource, Field(discriminator="kind")]


class Data(Sparse):
    """Where rows come from and how they are cleaned and split."""

    source: Source = Field(
        description="Preference data; also the demonstrations and prompts where no other source is named."
    )
    sft_source: Source | None = Field(description="Demonstrations; null takes the preferred replies of data.source.")
    prompt_source: Source | None = Field(
        description="Prompts for PPO and evaluation; null takes those of data.source."
    )
    vote_source: FileSource | None = Field(
        description="Further preferences, added to those of data.source: the votes of rlhf label. "
        "Lines that are no votes go to quarantine, a file that is not there yet adds none, "
        "and the tokenizer does not learn from them; null adds none."
    )
    feedback_source: str | None = Field(
        default=None,
        description="What users said of served replies, added to the rest: data/labels/feedback.jsonl, which a run "
        "renews from .rlhf/feedback.db (rlhf serve --keep-replies). Thumbs are for KTO, comparisons for the "
        "reward model and DPO too; neither the tokenizer nor SFT learns from them. null adds none.",
    )
    prompt_template: str = Field(description="How a plain prompt is put before the model; must contain {prompt}.")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="Share of prompts held out, by a stable hash of the prompt."
    )
    validation_fraction: Fraction = Field(
        description="Share of prompts whose demonstrations and preferences only choose among checkpoints (sft.keep, "
        "reward.keep, dpo.keep), and tell from which step on a model overfits; no stage trains on them."
    )
    judge_fraction: Fraction = Field(
        description="Share of prompts whose preferences only the judge of evaluate.judge learns "
        "from; no stage trains on them."
    )
    max_prompt_chars: Positive = Field(description="Longer prompts are quarantined.")
    max_response_chars: Positive = Field(description="Longer replies are quarantined.")
    max_quarantine_fraction: Fraction = Field(description="More refused rows than this fail the stage.")

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Shares of the prompts for test, judge and validation."""
        return self.test_fraction, self.judge_fraction, self.validation_fraction

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
        """Parameter -> path, of the local files that sources name, existing or not."""
        paths: dict[str, str] = {}
        for setting, source in self.sources().items():
            if isinstance(source, FileSource) and not source.is_url:
                paths[f"data.{setting}.path"] = source.path
            elif isinstance(source, PythonSource):
                paths[f"data.{setting}.path"] = source.script
                for number, path in enumerate(source.files):
                    paths[f"data.{setting}.files[{number}]"] = path
        if self.feedback_source is not None:
            paths["data.feedback_source"] = self.feedback_source
        return paths

    def urls(self) -> dict[str, str]:
        """Setting -> URL, of the sources that are URLs."""
        return {
            setting: source.path
            for setting, source in self.sources().items()
            if isinstance(source, FileSource) and source.is_url
        }

    def reads_elsewhere(self) -> bool:
        """Whether a source is a URL or a dataset of the hub: it must be read to tell whether it has changed."""
        hub = any(isinstance(source, HubSource) for source in self.sources().values())
        return hub or bool(self.urls())

    @model_validator(mode="after")
    def _votes(self) -> "Data":
        if self.vote_source is not None and self.vote_source.format in NO_PREFERENCES:
            raise ParamsError(
                f"data.vote_source.format={self.vote_source.format} has no preferences, as votes "
                "or pairs have. Change it in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _no_training_on_judge_data(self) -> "Data":
        for name, path in self.local_paths().items():
            if Path(path).parts[:2] == ("data", "judge"):
                raise ParamsError(
                    f"{name}={path} is the judge's: what it says of replies must not be trained "
                    "on. Name another file in params.yaml."
                )
        return self

    @model_validator(mode="after")
    def _leaves_rows(self) -> "Data":
        if self.test_fraction + self.validation_fraction + self.judge_fraction >= 1:
            raise ParamsError(
                f"data.test_fraction={self.test_fraction:g}, data.validation_fraction="
                f"{self.validation_fraction:g} and data.judge_fraction={self.judge_fraction:g} "
                "leave no prompts to train on: their sum must be below 1."
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
