"""How many rows and tokens a run will see: from the data stage's own metrics where they are of these params, else from
the source.

The data stage is not run for a plan. Numbers unknown before it runs are assumed, and the assumption is part of the
plan.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from config.schema import Params
from config.sections.base import Section
from config.sections.data import FileSource, HelpdeskSource, PythonSource, Source
from config.sections.online import Online
from config.yaml_text import yaml_content

UNKNOWN_ROWS = 1000
"""Assumed rows of a source that cannot be read."""
MEAN_OVER_LONGEST = 0.6
"""Assumed mean length of a bucketed batch over the longest sequence allowed, where the data stage has not measured
it.
"""
PAIR_OVER_SEQUENCE = 1.5
"""Assumed tokens of a pair over those of one of its sequences, where the data stage has not measured them: half of a
sequence is prompt, which the other has too.
"""
HELPDESK_TOKENS = {"sft": (36.2, 57.0), "preference": (36.5, 70.0), "prompts": (18.4, 23.0)}
"""Mean and longest text of the embedded world, as the data stage measures them with a tokenizer of 512 entries."""
HELPDESK_PAIR_TOKENS = (52.7, 102.0)
"""Tokens of the pairs, with the shared prefix counted once."""


@dataclass(frozen=True)
class Rows:
    """Training rows and mean tokens of each dataset."""

    sft: float
    preference: float
    prompts: float
    sft_tokens: float
    preference_tokens: float
    prompt_tokens: float
    longest_prompt: float
    longest_sft: float = float("inf")
    """Infinite until the data stage has measured it; the stage's own limit then holds."""
    longest_preference: float = float("inf")
    pair_tokens: float = float("inf")
    """Mean of both sequences of a preference pair, what both begin with counted once; infinite until the data stage
    has measured it: nothing is then known to be shared.
    """
    longest_pair: float = float("inf")
    sft_held_out: float = 0.0
    preference_held_out: float = 0.0
    prompts_held_out: float = float("inf")
    """Infinite if unknown."""
    ratings: float = 0.0
    """Rated replies beside those of the pairs."""
    ratings_held_out: float = 0.0
    ratings_tokens: float = 0.0
    longest_rating: float = 0.0
    assumptions: tuple[str, ...] = field(default=())

    @property
    def rated(self) -> float:
        """Rated replies, both of each pair among them."""
        return 2 * self.preference + self.ratings

    @property
    def rated_held_out(self) -> float:
        return 2 * self.preference_held_out + self.ratings_held_out

    @property
    def rated_tokens(self) -> float:
        """Mean tokens of a rated reply with its prompt."""
        total = 2 * self.preference * self.preference_tokens + self.ratings * self.ratings_tokens
        return total / self.rated if self.rated else self.preference_tokens

    @property
    def longest_rated(self) -> float:
        return max(self.longest_preference if self.preference else 0.0, self.longest_rating) or self.longest_preference


def count(params: Params, root: Path) -> Rows:
    """Rows of the run that `params` describes, in the project at `root`."""
    return _measured(params, root) or _from_sources(params, root)


def _measured(params: Params, root: Path) -> Rows | None:
    """The content of metrics/data.json, if dvc.lock says that it was made with this data section."""
    try:
        metrics = json.loads((root / "metrics" / "data.json").read_text(encoding="utf-8"))
        lock = yaml_content((root / "dvc.lock").read_text(encoding="utf-8"))
        made_with = lock["stages"]["data"]["params"]["params.yaml"]["data"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    if made_with != params.data.model_dump(mode="json"):
        return None
    try:
        return Rows(
            sft=metrics["sft_train_rows"],
            preference=metrics["preference_train_rows"],
            prompts=metrics["prompts_train_rows"],
            sft_tokens=metrics["sft_train_tokens_mean"],
            preference_tokens=metrics["preference_train_tokens_mean"],
            prompt_tokens=metrics["prompts_train_tokens_mean"],
            longest_prompt=metrics["prompts_train_tokens_max"],
            longest_sft=metrics.get("sft_train_tokens_max", float("inf")),
            longest_preference=metrics.get("preference_train_tokens_max", float("inf")),
            pair_tokens=metrics.get("preference_train_pair_tokens_mean", float("inf")),
            longest_pair=metrics.get("preference_train_pair_tokens_max", float("inf")),
            sft_held_out=metrics.get("sft_test_rows", 0.0),
            preference_held_out=metrics.get("preference_test_rows", 0.0),
            prompts_held_out=metrics.get("prompts_test_rows", float("inf")),
            ratings=metrics.get("ratings_train_rows", 0.0),
            ratings_held_out=metrics.get("ratings_test_rows", 0.0),
            ratings_tokens=metrics.get("ratings_train_tokens_mean", 0.0),
            longest_rating=metrics.get("ratings_train_tokens_max", 0.0),
            assumptions=("rows and lengths as metrics/data.json measured them",),
        )
    except KeyError:
        return None


def _from_sources(params: Params, root: Path) -> Rows:
    data = params.data
    sampled_share = 1 - data.test_fraction - data.judge_fraction
    keep = sampled_share - data.validation_fraction
    main, notes = source_rows(data.source, root, "data.source")
    sft, more = source_rows(data.sft_source, root, "data.sft_source") if data.sft_source else (main, ())
    prompts, most = source_rows(data.prompt_source, root, "data.prompt_source") if data.prompt_source else (main, ())
    votes = (file_rows(root / data.vote_source.path) or 0) if data.vote_source else 0
    sampled: Section = params.section(params.align.method)
    response = sampled.max_new_tokens if isinstance(sampled, Online) else params.evaluate.max_new_tokens
    limit = params.model.context_length - response
    reward = params.trained_reward
    pair_limit = reward.max_length if reward is not None else params.model.context_length
    sft_tokens, longest_sft, sft_note = _lengths(data.sft_source or data.source, "sft", params.sft.max_length)
    preference_tokens, longest_preference, preference_note = _lengths(data.source, "preference", pair_limit)
    prompt_tokens, longest_prompt, prompts_note = _lengths(data.prompt_source or data.source, "prompts", limit)
    embedded = isinstance(data.source, HelpdeskSource)
    rated = main["preference"] if getattr(data.source, "format", "") == "ratings" else 0.0
    pairs = main["preference"] + votes - rated
    return Rows(
        sft=sft["sft"] * keep,
        preference=pairs * keep,
        prompts=prompts["prompts"] * sampled_share,
        sft_tokens=sft_tokens,
        preference_tokens=preference_tokens,
        prompt_tokens=prompt_tokens,
        longest_prompt=min(longest_prompt, float(limit)),
        longest_sft=longest_sft,
        longest_preference=longest_preference,
        pair_tokens=HELPDESK_PAIR_TOKENS[0] if embedded else PAIR_OVER_SEQUENCE * preference_tokens,
        longest_pair=HELPDESK_PAIR_TOKENS[1] if embedded else float("inf"),
        sft_held_out=sft["sft"] * data.test_fraction,
        preference_held_out=pairs * data.test_fraction,
        prompts_held_out=prompts["prompts"] * data.test_fraction,
        ratings=rated * keep,
        ratings_held_out=rated * data.test_fraction,
        ratings_tokens=preference_tokens,
        longest_rating=longest_preference if rated else 0.0,
        assumptions=tuple(dict.fromkeys((*notes, *more, *most, sft_note, preference_note, prompts_note))),
    )


def _lengths(source: Source, dataset: str, limit: float) -> tuple[float, float, str]:
    """Mean and longest text of a dataset cut at `limit` tokens, and what was assumed for it."""
    if isinstance(source, HelpdeskSource):
        by_hand = source.world is None
        mean, longest = (HELPDESK_TOKENS if by_hand else world_tokens(source))[dataset]
        return min(mean, limit), longest, "lengths of the embedded world's texts"
    return (
        limit * MEAN_OVER_LONGEST,
        float("inf"),
        f"mean length assumed {MEAN_OVER_LONGEST:g} of the longest, until the data stage has measured it",
    )


def world_tokens(source: HelpdeskSource) -> dict[str, tuple[float, float]]:
    """Mean and longest text of a drawn world, a token for each word: what training/worlds/helpdesk.py puts into
    prompts and replies, by how often it does.
    """
    world, wrong = source.world, 1 - source.quality
    assert world is not None
    # words and mark of a fixed sentence
    sentence, longest_sentence = (2 + world.sentence_words) / 2 + 1, world.sentence_words + 1
    fact, order_number = world.fact_words + 2, 5
    # greeting, problem with its item, mood; the order number in every other prompt
    prompt = 3 * sentence + 2 + order_number / 2 + world.facts * fact
    longest_prompt = 3 * longest_sentence + 2 + order_number + world.facts * fact
    # a remedy, apology and question half the time, a filler where wrong and the close where right
    reply = 3 * sentence + (1 - 0.3 * wrong) * (3 + world.facts * fact) + 1
    longest_reply = 6 * longest_sentence + 3 + world.facts * fact + 1
    exchange, longest = prompt + reply, float(longest_prompt + longest_reply)
    return {
        "sft": (exchange, longest),
        "preference": (exchange, longest + 2 * longest_sentence),
        "prompts": (prompt, float(longest_prompt)),
    }


def source_rows(source: Source, root: Path, name: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Rows of each dataset that a source yields, and what was assumed for it."""
    if isinstance(source, HelpdeskSource):
        return {"sft": source.sft_rows, "preference": source.preference_rows, "prompts": source.prompt_rows}, ()
    counted = file_rows(root / source.path) if isinstance(source, FileSource) and "://" not in source.path else None
    if counted is None:
        note = f"{name}={source.path} cannot be counted before the data stage has run: {UNKNOWN_ROWS} rows assumed"
        return dict.fromkeys(("sft", "preference", "prompts"), float(UNKNOWN_ROWS)), (note,)
    assert not isinstance(source, PythonSource)
    if source.format in ("trees", "oasst-messages"):
        # a tree of some eleven messages (OpenAssistant, arXiv 2304.07327 section 3) holds about as many ranked pairs
        return {"sft": 4.0 * counted, "preference": 10.0 * counted, "prompts": 4.0 * counted}, (
            f"{name}: 10 pairs assumed in each of {counted} trees",
        )
    return dict.fromkeys(("sft", "preference", "prompts"), float(counted)), (
        f"{name}: {counted} rows, refused ones not taken off",
    )


def file_rows(path: Path) -> int | None:
    """Rows of a local file: lines of jsonl and csv, entries of a json list; None where counting them takes reading all
    of it.
    """
    try:
        if path.suffix == ".jsonl":
            return _lines(path)
        if path.suffix == ".csv":
            return max(0, _lines(path) - 1)
        if path.suffix == ".json":
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            return len(content) if isinstance(content, list) else None
    except (OSError, ValueError):
        return None
    return None


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
