"""The preference pairs of a split, tokenised: the training data of the reward stage and DPO."""

from typing import NamedTuple

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
