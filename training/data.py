"""Stage `data`: from a source of preferences to clean rows in TRL's forms, split by prompt, and the tokenizer.

params.yaml (seed, model, data) and the source -> data/prepared, data/tokenizer, metrics/data.json, plots/data_*.csv
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from config.errors import ParamsError
from config.schema import Params
from config.sections.data import HelpdeskSource
from training.evaluation.intervals import Proportion
from training.modeling.tokenizer import SMALLEST_VOCABULARY, encode_prompts, encode_responses
from training.preparation.cleaning import KEPT_QUARANTINE, Quarantine
from training.preparation.examples import read_sources
from training.preparation.prepared import (
    Accepted,
    Passes,
    base_tokenizer,
    refuse_empty_splits,
    refuse_if_too_many,
    text_rules,
)
from training.preparation.sources import local_files
from training.preparation.summary import (
    baselines,
    duplicate_metrics,
    flat,
    gold_metrics,
    label_balance,
    length_histogram,
    row_counts,
    side_by_side,
    source_metrics,
    token_lengths,
)
from training.preparation.vocabulary import train_tokenizer
from training.process.artifacts import replacing, write_csv, write_json
from training.process.run import run_stage
from training.process.stage import Stage
from training.worlds import helpdesk
from training.worlds.world import World, world_of

logger = logging.getLogger("training.data")  # as a process this module is called __main__

SECTIONS = ("seed", "model", "data")
INPUTS = local_files
EXCHANGES = 2000
"""Prompts sampled to find the longest exchange of a generated world."""
UNLIMITED_VOCABULARY = 1 << 16


def data(stage: Stage) -> None:
    params, root, settings = stage.params, stage.root, stage.params.data
    base = base_tokenizer(params)
    with replacing(root / "data/prepared") as folder:
        quarantine = Quarantine(folder / "quarantine.jsonl")
        passes = Passes(quarantine, settings, stage.stop_if_requested)
        # 1. read and check every row of every source
        with stage.meter.phase("read", 0) as work:
            accepted = passes.read(read_sources(params, root), text_rules(params, base))
            rows_read = sum(source.rows_read for source in accepted)
            work.add(sequences=rows_read)
            refuse_if_too_many(accepted, quarantine, settings, root)
        for source in accepted:
            for warning in source.reading.warnings:
                logger.warning("%s", warning)
        # 2. the tokenizer, and the four datasets
        with stage.meter.phase("tokenise", 0) as work:
            tokenizer = base or tokenizer_of_world(accepted, params)
            datasets = passes.write(accepted, tokenizer, params.model.context_length)
            lengths = [split.sequence_tokens() for _, _, split in datasets.items()]
            work.add(sum(int(tokens.sum()) for tokens in lengths), sum(map(len, lengths)))
            refuse_if_too_many(accepted, quarantine, settings, root)
            refuse_empty_splits(datasets, settings.test_fraction)
        stage.stop_if_requested()
        # 3. baselines for the reward model, and summary statistics
        with stage.meter.phase("summarise", 0):
            trivial, histogram = baselines(datasets), length_histogram(datasets)
            votes = sum(len(source.digests["preference"]) for source in accepted if not source.need.teaches_tokens)
            metrics = {
                **source_metrics(accepted, quarantine),
                **duplicate_metrics(datasets),
                **row_counts(datasets),
                **token_lengths(datasets),
                **label_balance(datasets),
                **flat(trivial, "baseline"),
                "vote_pairs": votes,
                **gold_metrics(datasets, settings, labels_known=not votes),
                "vocab_size": len(tokenizer),
            }
            shown = side_by_side(
                example for source in accepted if "preference" in source.need.uses for example in source
            )
        for source in accepted:
            source.remove()
        stage.stop_if_requested()
        stage.check_params()
    # 4. put the rest in place
    with replacing(root / "data/tokenizer") as folder:
        tokenizer.save_pretrained(folder)
    write_plots(root / "plots", histogram, trivial)
    write_json(root / "metrics/data.json", metrics)
    (root / KEPT_QUARANTINE).unlink(missing_ok=True)
    if not settings.reads_elsewhere():
        stage.finish(
            "data/prepared",
            "data/tokenizer",
            "metrics/data.json",
            "plots/data_lengths.csv",
            "plots/data_baselines.csv",
        )
    for line in shown:
        logger.info("%s", line)
    counts = ", ".join(f"{split.rows} {use}/{name}" for use, name, split in datasets.items() if split.rows)
    logger.info("%d of %d rows refused; prepared %s", quarantine.total, rows_read, counts)


def tokenizer_of_world(accepted: Sequence[Accepted], params: Params) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the sources meant for it. Raises ParamsError if its vocabulary is too small for a
    generated world.
    """
    teaching = [source for source in accepted if source.need.teaches_tokens]
    tokenizer = train_tokenizer(teaching, params)
    refuse_too_large_world(tokenizer, teaching, params)
    return tokenizer


def write_plots(
    folder: Path, histogram: Sequence[tuple[str, str, int, int]], trivial: Mapping[str, Proportion | None]
) -> None:
    """Sequence lengths, and the accuracy of trivial predictors."""
    write_csv(folder / "data_lengths.csv", ("dataset", "split", "tokens", "sequences"), histogram)
    write_csv(
        folder / "data_baselines.csv",
        ("baseline", "accuracy", "low", "high"),
        [(name, *p) for name, p in trivial.items() if p is not None],
    )


def refuse_too_large_world(tokenizer: PreTrainedTokenizerBase, teaching: Sequence[Accepted], params: Params) -> None:
    """Check that a generated world has a token for each word, and room for its best replies.

    Raises ParamsError with sizes that suffice.
    """
    source, shape = params.data.source, params.model.random
    if not isinstance(source, HelpdeskSource) or shape is None:
        return
    world = world_of(source)
    entries = shape.vocab_size - SMALLEST_VOCABULARY
    if entries < len(world.words):
        enough = len(train_tokenizer(teaching, params, UNLIMITED_VOCABULARY))
        raise ParamsError(
            f"model.random.vocab_size={shape.vocab_size} leaves {max(entries, 0)} entries beside bytes and special "
            f"tokens for the {len(world.words)} words of data.source: {enough} would hold each as one token. "
            "Raise it, or lower data.source.world.vocabulary, in params.yaml."
        )
    context, longest = params.model.context_length, longest_exchange(tokenizer, world)
    if longest > context:
        complete = train_tokenizer(teaching, params, UNLIMITED_VOCABULARY)
        or_vocabulary = (
            f", and so would model.random.vocab_size={len(complete)}"
            if longest_exchange(complete, world) <= context
            else ""
        )
        raise ParamsError(
            f"model.context_length={context} is too short for the world of data.source, where a "
            f"prompt and its best reply take up to {longest} tokens: {longest} would do"
            f"{or_vocabulary}. Change it in params.yaml."
        )


def longest_exchange(tokenizer: PreTrainedTokenizerBase, world: World) -> int:
    """Tokens of the longest prompt with its best reply."""
    exchanges = helpdesk.exchanges(world, EXCHANGES)
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in exchanges])
    replies = encode_responses(tokenizer, [best for _, best in exchanges])
    return max(len(a) + len(b) for a, b in zip(prompts, replies, strict=True))


if __name__ == "__main__":
    sys.exit(run_stage("data", SECTIONS, INPUTS, data))
