"""Statistics of the data stage: metrics/data.json and plots/data_*.csv."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from config.sections.data import Data, HelpdeskSource
from training.evaluation.intervals import Proportion
from training.modeling.tokenizer import prompt_text, response_text
from training.preparation import helpdesk
from training.preparation.baselines import ReplyPair, bag_of_words, longer_wins
from training.preparation.cleaning import (
    Refusal,
    contradictory_pairs,
    reasons,
    same_prompt_key,
)
from training.preparation.formats import Example, Parsed
from training.preparation.rows import REPLIES, USES, Datasets, Row, each
from training.preparation.splits import SPLITS
from training.preparation.worlds import world_of

HISTOGRAM_BINS = 30


def source_metrics(parsed: Sequence[Parsed], refusals: Sequence[Refusal]) -> dict[str, Any]:
    """Rows (messages, of trees) read, kept, and refused by reason."""
    rows_read = sum(part.rows_read for part in parsed)
    return {
        "rows_read": rows_read,
        "rows_kept": rows_read - len(refusals),
        "rows_quarantined": len(refusals),
        "quarantine_fraction": len(refusals) / rows_read,
        **{f"quarantined_{reason}": count for reason, count in reasons(refusals).items()},
        "trees_read": sum(part.trees for part in parsed),
        "ties_dropped": sum(part.ties for part in parsed),
        "replies_unranked": sum(part.replies_unranked for part in parsed),
    }


def duplicate_metrics(
    by_use: Mapping[str, Sequence[Example]], datasets: Datasets
) -> dict[str, int]:
    """Exact duplicates dropped per dataset, and contradicting pairs, which are kept."""
    made = {use: sum(len(REPLIES[use](example)) for example in by_use[use]) for use in USES}
    keys = [
        (same_prompt_key(example.prompt), pair.chosen, pair.rejected)
        for example in by_use["preference"]
        for pair in example.pairs
    ]
    return {
        **{
            f"{use}_duplicates": made[use] - sum(len(rows) for rows in datasets[use].values())
            for use in USES
        },
        "contradictory_pairs": contradictory_pairs(keys),
    }


def row_counts(datasets: Datasets) -> dict[str, int]:
    """`<dataset>_<split>_rows` and `_unique_prompts`."""
    counts = {}
    for name, split, rows in each(datasets):
        counts[f"{name}_{split}_rows"] = len(rows)
        counts[f"{name}_{split}_unique_prompts"] = len(
            {same_prompt_key(row.content["prompt"]) for row in rows}
        )
    return counts


def token_lengths(datasets: Datasets) -> dict[str, float]:
    """`<dataset>_<split>_tokens_mean`, `_p50`, `_p95` and `_max` of the sequences a model will see;
    of pairs also `_pair_tokens_mean` and `_max`, with the common prefix counted once.
    """
    lengths: dict[str, float] = {}
    for name, split, rows in each(datasets):
        tokens = _sequence_tokens(rows) if rows else np.zeros(1)
        lengths |= {
            f"{name}_{split}_tokens_mean": float(tokens.mean()),
            f"{name}_{split}_tokens_p50": float(np.percentile(tokens, 50)),
            f"{name}_{split}_tokens_p95": float(np.percentile(tokens, 95)),
            f"{name}_{split}_tokens_max": int(tokens.max()),
        }
        pairs = [row.pair_tokens for row in rows if row.pair_tokens is not None]
        if pairs:
            lengths |= {
                f"{name}_{split}_pair_tokens_mean": sum(pairs) / len(pairs),
                f"{name}_{split}_pair_tokens_max": max(pairs),
            }
    return lengths


def length_histogram(datasets: Datasets) -> list[tuple[str, str, int, int]]:
    """(dataset, split, tokens at the lower edge of the bin, sequences in it), the same bins for
    every dataset.
    """
    everything = np.concatenate([_sequence_tokens(rows) for _, _, rows in each(datasets)])
    width = -(-(int(everything.max()) + 1) // HISTOGRAM_BINS)
    table = []
    for name, split, rows in each(datasets):
        if not rows:
            continue
        bins = Counter((_sequence_tokens(rows) // width * width).tolist())
        table += [(name, split, tokens, bins[tokens]) for tokens in range(0, max(bins) + 1, width)]
    return table


def _sequence_tokens(rows: Sequence[Row]) -> np.ndarray:
    return np.array([tokens for row in rows for tokens in row.sequence_tokens])


def baselines(pairs: Mapping[str, Sequence[ReplyPair]]) -> dict[str, Proportion | None]:
    """The trivial predictors, on the test pairs; None without any."""
    if not pairs["test"]:
        return {"longer_wins": None, "bow": None}
    return {
        "longer_wins": longer_wins(pairs["test"]),
        "bow": bag_of_words(pairs["train"], pairs["test"]),
    }


def label_balance(
    pairs: Mapping[str, Sequence[ReplyPair]], chosen_first: Sequence[bool | None]
) -> dict[str, float | None]:
    """Share of pairs whose preferred reply is the longer one, over all splits, and share whose
    preferred reply was shown first, if known.
    """
    everything = [pair for split in SPLITS for pair in pairs[split]]
    known = [first for first in chosen_first if first is not None]
    return {
        "chosen_longer": longer_wins(everything).value if everything else None,
        "chosen_first": sum(known) / len(known) if known else None,
    }


def flat(proportions: Mapping[str, Proportion | None], prefix: str) -> dict[str, float | None]:
    """`<prefix>_<name>`, `_low` and `_high`, as DVC shows metrics."""
    return {
        f"{prefix}_{name}{suffix}": value
        for name, proportion in proportions.items()
        for suffix, value in zip(("", "_low", "_high"), proportion or [None] * 3, strict=True)
    }


def reply_pairs(rows: Iterable[Row]) -> list[ReplyPair]:
    """The bare texts of preference rows."""
    return [
        ReplyPair(response_text(row.content["chosen"]), response_text(row.content["rejected"]))
        for row in rows
    ]


def gold_metrics(datasets: Datasets, settings: Data, labels_known: bool) -> dict[str, float | None]:
    """In a helpdesk world: the best possible accuracy on the test pairs, and the demonstrations'
    mean gold score.

    `labels_known`: all labels are the world's; the certainty of human labels is unknown.
    """
    metrics: dict[str, float | None] = {"bayes_accuracy": None, "gold_sft_mean": None}
    if isinstance(settings.source, HelpdeskSource):
        if labels_known:
            pairs = [row.content for row in datasets["preference"]["test"]]
            metrics["bayes_accuracy"] = helpdesk.bayes_accuracy(
                pairs, settings.source.temperature, world_of(settings.source)
            )
        if settings.sft_source is None or isinstance(settings.sft_source, HelpdeskSource):
            demonstrations = [row.content for row in datasets["sft"]["train"]]
            metrics["gold_sft_mean"] = helpdesk.mean_gold(
                demonstrations, world_of(settings.sft_source or settings.source)
            )
    return metrics


def side_by_side(examples: Iterable[Example], count: int = 2) -> list[str]:
    """The first pairs, in lines of at most 80 characters: the prompt, and below it the chosen reply
    beside the rejected one.
    """
    found = [(each.prompt, pair) for each in examples for pair in each.pairs[:1]][:count]
    lines = []
    for prompt, pair in found:
        lines += ["prompt", *_wrapped(prompt_text(prompt), 78)]
        sides = [_wrapped(text, COLUMN) for text in pair[:2]]
        lines.append(f"{'chosen':<{COLUMN}}| rejected")
        lines += [
            f"{left:<{COLUMN}}| {right}".rstrip()
            for left, right in zip_longest(*sides, fillvalue="")
        ]
        lines.append("")
    return lines


COLUMN, SHOWN_LINES = 38, 6
"""Characters and lines of a reply shown."""


def _wrapped(text: str, width: int) -> list[str]:
    lines = [
        part
        for line in text.splitlines()
        for part in (textwrap.wrap(line, width - 2, replace_whitespace=False) or [""])
    ]
    cut = lines[:SHOWN_LINES]
    return [f"  {line}" for line in (cut if len(cut) == len(lines) else [*cut[:-1], "..."])]
