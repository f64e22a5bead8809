"""The preference pairs of a split, tokenised, for the reward stage and DPO; and its rated replies, for KTO."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from config.errors import DataError
from training.preparation.tokens import Ids, Rows, TokenTable
from training.process.stage import Stage


class Pairs(NamedTuple):
    """Tokenised pairs, read from disk as they are asked for."""

    rows: Rows[dict[str, Ids]]
    """{prompt_ids, chosen_ids, rejected_ids}"""
    lengths: NDArray[np.int64]
    """Tokens of the longer of each pair's two sequences."""
    too_long: int
    """Pairs left out because a sequence is longer than the stage's max_length."""


def read_pairs(stage: Stage, split: str) -> Pairs:
    """The pairs of a split whose two sequences have at most the stage's max_length tokens.

    Raises DataError if none is left.
    """
    limit: int = stage.params.section(stage.name).max_length
    path = stage.root / f"data/prepared/preference/{split}.arrow"
    table = TokenTable(path)
    if not len(table):
        raise DataError(f"{path} has no pairs: data.source has no preferences. Name another source.")
    replies = np.maximum(table.lengths("chosen_ids"), table.lengths("rejected_ids"))
    lengths = table.lengths("prompt_ids") + replies
    places = np.flatnonzero(lengths <= limit)
    if not len(places):
        raise DataError(
            f"{path} has no pair that fits in {stage.name}.max_length={limit} ({len(table)} are "
            "longer). Raise it in params.yaml."
        )
    return Pairs(Rows(places, table.row), lengths[places], len(table) - len(places))


class Ratings(NamedTuple):
    """Tokenised rated replies, read from disk as they are asked for."""

    rows: Rows[dict[str, Any]]
    """{prompt_ids, completion_ids, KL_completion_ids, label}: a reply, whether it is good, and the reply to another
    prompt, cut where both together would be too long.
    """
    lengths: NDArray[np.int64]
    """Tokens of prompt and reply."""
    labels: NDArray[np.bool_]
    too_long: int
    """Replies left out because they end beyond the stage's max_length."""


def read_ratings(stage: Stage, split: str) -> Ratings:
    """The rated replies of a split with at most the stage's max_length tokens: those of data/prepared/ratings, and
    both replies of each pair, of which the chosen one is good.

    Each prompt has the reply of another beside its own, in an order drawn with `seed`: what KTO estimates its KL from.
    Raises DataError if fewer than two are left.
    """
    limit: int = stage.params.section(stage.name).max_length
    prepared = stage.root / "data/prepared"
    ratings, pairs = (TokenTable(prepared / use / f"{split}.arrow") for use in ("ratings", "preference"))
    said = [bool(ratings.row(row)["label"][0]) for row in range(len(ratings))]
    sides = [(ratings, "completion_ids", said), (pairs, "chosen_ids", True), (pairs, "rejected_ids", False)]
    ends = np.cumsum([len(table) for table, _, _ in sides])
    labels = np.concatenate([np.full(len(table), good, dtype=bool) for table, _, good in sides])
    lengths = np.concatenate([table.lengths("prompt_ids") + table.lengths(column) for table, column, _ in sides])
    kept = np.flatnonzero(lengths <= limit)
    if len(kept) < 2:
        raise DataError(
            f"{prepared} has {len(kept)} rated replies in its {split} split that fit in "
            f"{stage.name}.max_length={limit}, of {len(lengths)}. Raise it in params.yaml, or name another source."
        )
    order = np.random.default_rng(stage.params.seed).permutation(kept)
    mismatched = np.empty(len(lengths), dtype=np.int64)
    mismatched[order] = np.roll(order, 1)

    def prompt_and_reply(index: int) -> tuple[Ids, Ids]:
        side = int(np.searchsorted(ends, index, side="right"))
        table, column, _ = sides[side]
        row = table.row(index - int(ends[side]) + len(table))
        return row["prompt_ids"], row[column]

    def rated(index: int) -> dict[str, Any]:
        (prompt_ids, reply), (_, other) = prompt_and_reply(index), prompt_and_reply(int(mismatched[index]))
        return {"prompt_ids": prompt_ids, "completion_ids": reply,
                "KL_completion_ids": other[: limit - len(prompt_ids)], "label": bool(labels[index])}  # fmt: skip

    return Ratings(Rows(kept, rated), lengths[kept], labels[kept], len(lengths) - len(kept))
