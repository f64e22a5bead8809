"""Whether a file's examples fit the params of a run: refused rows, and lengths against the model's limits."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from config.methods.registry import OFFLINE_METHODS
from config.schema import Params
from training.preparation.prepared import Datasets, Split
from training.preparation.splits import SPLITS


class Fit(NamedTuple):
    """Lengths are in tokens of the params' model."""

    context_length: int
    max_length: int
    """reward.max_length, or that of a method that learns from the pairs itself."""
    setting: str
    """Name of that parameter."""
    refused: int
    """Rows, those whose prompt fills the context included."""
    rows: int
    limit: float
    """data.max_quarantine_fraction."""
    too_long: int
    """Pairs with a sequence over `max_length`, which are left out."""
    pairs: int
    sft_max_length: int
    cut: int
    """Demonstrations whose reply loses its end at sft.max_length."""
    dropped: int
    """Demonstrations whose prompt alone is as long."""
    demonstrations: int
    prompt_tokens: Mapping[str, int]
    """p95 and maximum; of prompts and of full sequences."""
    sequence_tokens: Mapping[str, int]
    fault: str | None
    """Why the data stage would fail, in a line; empty if it would not."""
    enough: float | None
    """A data.max_quarantine_fraction that lets these rows pass, if the current one does not."""


def fit(datasets: Datasets, refused: int, rows: int, params: Params) -> Fit:
    """How the rows of one source fit. They were written with all the room there is, without `refused` of `rows`.
    Examples whose prompt leaves no room for a reply are refused by a run, pairs that are too long left out.
    """
    context, limit = params.model.context_length, params.data.max_quarantine_fraction
    prompt_lengths = np.asarray(datasets.prompt_tokens, dtype=np.int64)
    crowded = int((prompt_lengths >= context).sum())
    sft, preference, ratings = (_lengths(datasets.splits[use].values()) for use in ("sft", "preference", "ratings"))
    rated = ratings["prompt_ids"] + ratings["completion_ids"]
    pairs = preference["prompt_ids"] + np.maximum(preference["chosen_ids"], preference["rejected_ids"])
    demonstrations = sft["prompt_ids"] + sft["completion_ids"]
    setting = params.align.method if params.align.method in OFFLINE_METHODS else "reward"
    max_length = getattr(params.section(setting), "max_length", context)  # a function has none
    share = (refused + crowded) / max(1, rows)
    enough = min(1.0, math.ceil(100 * share) / 100) if share > limit else None
    spread = _spread(prompt_lengths)
    longest = params.sft.max_length
    fault = _fault(refused + crowded, rows, limit, enough, crowded, context, spread["p95"])
    return Fit(
        context_length=context,
        max_length=max_length,
        setting=f"{setting}.max_length",
        refused=refused + crowded,
        rows=rows,
        limit=limit,
        too_long=int((pairs > max_length).sum()),
        pairs=len(pairs),
        sft_max_length=longest,
        cut=int(((sft["prompt_ids"] < longest) & (demonstrations > longest)).sum()),
        dropped=int((sft["prompt_ids"] >= longest).sum()),
        demonstrations=len(demonstrations),
        prompt_tokens=spread,
        sequence_tokens=_spread(next(filter(len, (pairs, rated, demonstrations)), prompt_lengths)),
        fault=fault or _empty(datasets, params.data.test_fraction),
        enough=enough,
    )


def _lengths(splits: Iterable[Split]) -> dict[str, NDArray[np.int64]]:
    """Tokens of each row of all splits, by column."""
    lengths = [split.lengths() for split in splits]
    return {column: np.concatenate([columns[column] for columns in lengths]) for column in lengths[0]}


def _spread(lengths: NDArray[np.int64]) -> dict[str, int]:
    if not len(lengths):
        return {"p95": 0, "max": 0}
    return {"p95": math.ceil(np.percentile(lengths, 95)), "max": int(lengths.max())}


def _fault(
    refused: int, rows: int, limit: float, enough: float | None, crowded: int, context: int, p95: int
) -> str | None:
    why, remedy = "", "fix the rows"
    if 2 * crowded > refused:
        why = f", {crowded:,} as their prompts fill model.context_length={context}"
        remedy = f"raise model.context_length (95% of the prompts have up to {p95} tokens)"
    if refused >= rows:
        return f"all {rows:,} rows are refused{why}; none is left to train on. To go on, {remedy}."
    if enough is None:
        return None
    return (
        f"{refused:,} of {rows:,} rows ({refused / rows:.1%}) are refused{why}; "
        f"data.max_quarantine_fraction={limit:g}. Set it to {enough:g}, or {remedy}."
    )


def _empty(datasets: Datasets, test_fraction: float) -> str | None:
    """Both splits need prompts."""
    empty = [name for name in SPLITS if not datasets.splits["prompts"][name].rows]
    if not empty:
        return None
    return (
        f"no prompt is left for the {empty[0]} split at data.test_fraction={test_fraction}. Add "
        "prompts, or change data.test_fraction."
    )
