"""Statistics of the data stage: metrics/data.json and plots/data_*.csv."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from config import jsonl
from config.sections.data import Data, HelpdeskSource
from training.evaluation.intervals import Proportion, wilson
from training.modeling.tokenizer import prompt_text, response_text
from training.preparation.baselines import ReplyPair, bag_of_words
from training.preparation.cleaning import Quarantine
from training.preparation.formats import Example
from training.preparation.prepared import Accepted, Datasets, Split
from training.preparation.splits import SPLITS
from training.worlds import helpdesk
from training.worlds.world import world_of

MOST_PAIRS = 20_000
"""Pairs of each split for the bag of words: more move it by less than its interval."""
HISTOGRAM_BINS = 30


def source_metrics(accepted: Sequence[Accepted], quarantine: Quarantine) -> dict[str, Any]:
    """Rows (messages, of trees) read, kept, and refused by reason."""
    rows_read, refused = sum(source.rows_read for source in accepted), quarantine.total
    readings = [source.reading for source in accepted]
    return {
        "rows_read": rows_read,
        "rows_kept": rows_read - refused,
        "rows_quarantined": refused,
        "quarantine_fraction": refused / rows_read,
        **{f"quarantined_{reason}": n for reason, n in quarantine.counts.most_common()},
        "trees_read": sum(reading.trees for reading in readings),
        "ties_dropped": sum(reading.ties for reading in readings),
        "replies_unranked": sum(reading.replies_unranked for reading in readings),
    }


def duplicate_metrics(datasets: Datasets) -> dict[str, int]:
    """Exact duplicates dropped per dataset, and contradicting pairs, which are kept."""
    return {
        **{f"{use}_duplicates": count for use, count in datasets.duplicates.items()},
        "contradictory_pairs": datasets.contradictory_pairs(),
    }


def row_counts(datasets: Datasets) -> dict[str, int]:
    """`<dataset>_<split>_rows` and `_unique_prompts`."""
    counts = {}
    for use, name, split in datasets.items():
        counts[f"{use}_{name}_rows"] = split.rows
        counts[f"{use}_{name}_unique_prompts"] = len(np.unique(split.prompts))
    return counts


def token_lengths(datasets: Datasets) -> dict[str, float]:
    """`<dataset>_<split>_tokens_mean`, `_p50`, `_p95` and `_max` of the sequences a model will see; of pairs also
    `_pair_tokens_mean` and `_max`, with the common prefix counted once.
    """
    lengths: dict[str, float] = {}
    for use, name, split in datasets.items():
        tokens = split.sequence_tokens() if split.rows else np.zeros(1)
        lengths |= {
            f"{use}_{name}_tokens_mean": float(tokens.mean()),
            f"{use}_{name}_tokens_p50": float(np.percentile(tokens, 50)),
            f"{use}_{name}_tokens_p95": float(np.percentile(tokens, 95)),
            f"{use}_{name}_tokens_max": int(tokens.max()),
        }
        pairs = split.pair_tokens
        if pairs:
            lengths |= {
                f"{use}_{name}_pair_tokens_mean": sum(pairs) / len(pairs),
                f"{use}_{name}_pair_tokens_max": max(pairs),
            }
    return lengths


def length_histogram(datasets: Datasets) -> list[tuple[str, str, int, int]]:
    """(dataset, split, tokens at the lower edge of the bin, sequences in it), the same bins for every dataset."""
    lengths = [(use, name, split.sequence_tokens()) for use, name, split in datasets.items()]
    longest = max(int(tokens.max(initial=0)) for _, _, tokens in lengths)
    width = -(-(longest + 1) // HISTOGRAM_BINS)
    table = []
    for use, name, tokens in lengths:
        counts = np.bincount(tokens // width)
        table += [(use, name, i * width, int(count)) for i, count in enumerate(counts)]
    return table


def baselines(datasets: Datasets) -> dict[str, Proportion | None]:
    """The trivial predictors, on the test pairs; None without any."""
    train, test = (datasets.splits["preference"][name] for name in SPLITS)
    if not test.rows:
        return {"longer_wins": None, "bow": None}
    return {
        "longer_wins": wilson(test.longer_wins, test.rows),
        "bow": bag_of_words(some_pairs(train), some_pairs(test)),
    }


def some_pairs(split: Split) -> list[ReplyPair]:
    """The bare texts of at most MOST_PAIRS preference rows, evenly spaced."""
    step = -(-split.rows // MOST_PAIRS) or 1
    rows = jsonl.plain(split.path, step)
    return [ReplyPair(*(response_text(row[side]) for side in ReplyPair._fields)) for row in rows]


def label_balance(datasets: Datasets) -> dict[str, float | None]:
    """Share of pairs whose preferred reply is the longer one, over train and test, and share whose preferred reply was
    shown first, if known.
    """
    splits = [datasets.splits["preference"][name] for name in SPLITS]
    pairs, with_order = sum(split.rows for split in splits), datasets.known_orders
    longer = sum(split.longer_wins for split in splits)
    return {
        "chosen_longer": longer / pairs if pairs else None,
        "chosen_first": datasets.chosen_first / with_order if with_order else None,
    }


def flat(proportions: Mapping[str, Proportion | None], prefix: str) -> dict[str, float | None]:
    """`<prefix>_<name>`, `_low` and `_high`, as DVC shows metrics."""
    return {
        f"{prefix}_{name}{suffix}": value
        for name, proportion in proportions.items()
        for suffix, value in zip(("", "_low", "_high"), proportion or [None] * 3, strict=True)
    }


def gold_metrics(datasets: Datasets, settings: Data, labels_known: bool) -> dict[str, float | None]:
    """In a helpdesk world: the best possible accuracy on the test pairs, and the demonstrations' mean gold score.

    `labels_known`: all labels are the world's; the certainty of human labels is unknown.
    """
    metrics: dict[str, float | None] = {"bayes_accuracy": None, "gold_sft_mean": None}
    if isinstance(settings.source, HelpdeskSource):
        if labels_known:
            metrics["bayes_accuracy"] = helpdesk.bayes_accuracy(
                jsonl.plain(datasets.splits["preference"]["test"].path),
                settings.source.temperature,
                world_of(settings.source),
            )
        if settings.sft_source is None or isinstance(settings.sft_source, HelpdeskSource):
            metrics["gold_sft_mean"] = helpdesk.mean_gold(
                jsonl.plain(datasets.splits["sft"]["train"].path), world_of(settings.sft_source or settings.source)
            )
    return metrics


def side_by_side(examples: Iterable[Example], count: int = 2) -> list[str]:
    """The first pairs, in lines of at most 80 characters: the prompt, and below it the chosen reply beside the
    rejected one.
    """
    firsts = ((example.prompt, pair) for example in examples for pair in example.pairs[:1])
    lines = []
    for prompt, pair in islice(firsts, count):
        lines += ["prompt", *_wrapped(prompt_text(prompt), 78)]
        sides = [_wrapped(text, COLUMN) for text in pair[:2]]
        lines.append(f"{'chosen':<{COLUMN}}| rejected")
        lines += [f"{chosen:<{COLUMN}}| {right}".rstrip() for chosen, right in zip_longest(*sides, fillvalue="")]
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
