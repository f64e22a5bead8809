"""Stage `data`: from a source of preferences to clean rows in TRL's forms, split by prompt, and the
tokenizer.

params.yaml (seed, model, data) and the source -> data/prepared, data/tokenizer, metrics/data.json,
plots/data_*.csv
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
from training.modeling.tokenizer import (
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    encode_prompts,
    encode_responses,
    pretrained_tokenizer,
    special_tokens,
)
from training.preparation import helpdesk
from training.preparation.cleaning import TextRules
from training.preparation.examples import (
    QUARANTINE_OF_FAILED_ATTEMPT,
    Need,
    examples_for,
    parse,
    read_sources,
    refuse_if_too_many,
    vote_pairs,
)
from training.preparation.formats import Example, Parsed
from training.preparation.rows import (
    USES,
    Datasets,
    each,
    in_one_form,
    make_dataset,
    refuse_empty_splits,
    with_room,
    write_prepared,
)
from training.preparation.sources import local_files
from training.preparation.splits import SPLITS
from training.preparation.summary import (
    baselines,
    duplicate_metrics,
    flat,
    gold_metrics,
    label_balance,
    length_histogram,
    reply_pairs,
    row_counts,
    side_by_side,
    source_metrics,
    token_lengths,
)
from training.preparation.vocabulary import train_tokenizer
from training.preparation.worlds import World, world_of
from training.process.artifacts import replacing, write_csv, write_json
from training.process.stage import Stage, run_stage

logger = logging.getLogger("training.data")  # as a process this module is called __main__

SECTIONS = ("seed", "model", "data")
INPUTS = local_files
EXCHANGES = 2000
"""Prompts sampled to find the longest exchange of a generated world."""
UNLIMITED_VOCABULARY = 1 << 16


def data(stage: Stage) -> None:
    params, root = stage.params, stage.root
    # 1. read every source
    with stage.meter.phase("read", 0) as work:
        needs = read_sources(params, root)
        work.add(sequences=sum(len(need.table.rows) for need in needs))
    stage.stop_if_requested()
    # 2. check every row
    with stage.meter.phase("clean", 0) as work:
        base = (
            None
            if params.model.path is None
            else pretrained_tokenizer(params.model, params.data.prompt_template)
        )
        parsed = clean(needs, base, params, root)
        refusals = [refusal for part in parsed for refusal in part.refusals]
        work.add(sequences=sum(part.rows_read for part in parsed))
    stage.stop_if_requested()
    # 3. the tokenizer, the prompts that leave no room for a response, and the three datasets
    with stage.meter.phase("tokenise", 0) as work:
        examples = [example for part in parsed for example in part.examples]
        tokenizer = base or tokenizer_of_world(needs, parsed, params)
        tokens, without_room = with_room(tokenizer, examples, params.model.context_length)
        refusals += without_room
        refuse_if_too_many(refusals, parsed, params.data, root)
        by_use = {
            use: [example for example in examples_for(use, needs, parsed) if example in tokens]
            for use in USES
        }
        datasets = {
            use: make_dataset(
                use,
                by_use[use],
                params.data.fractions,
                tokenizer,
                tokens,
            )
            for use in USES
        }
        refuse_empty_splits(datasets, params.data.test_fraction)
        sequences = [
            length for *_, rows in each(datasets) for row in rows for length in row.sequence_tokens
        ]
        work.add(sum(sequences), len(sequences))
    stage.stop_if_requested()
    # 4. baselines for the reward model, and summary statistics
    with stage.meter.phase("summarise", 0):
        pairs = {split: reply_pairs(datasets["preference"][split]) for split in SPLITS}
        trivial = baselines(pairs)
        votes = vote_pairs(needs, parsed)
        metrics = {
            **source_metrics(parsed, refusals),
            **duplicate_metrics(by_use, datasets),
            **row_counts(datasets),
            **token_lengths(datasets),
            **label_balance(
                pairs,
                [pair.chosen_first for example in by_use["preference"] for pair in example.pairs],
            ),
            **flat(trivial, "baseline"),
            "vote_pairs": votes,
            **gold_metrics(datasets, params.data, labels_known=not votes),
            "vocab_size": len(tokenizer),
        }
    stage.stop_if_requested()
    stage.check_params()
    # 5. put everything in place
    with stage.meter.phase("write", 0):
        write_prepared(root / "data/prepared", datasets, refusals)
        with replacing(root / "data/tokenizer") as folder:
            tokenizer.save_pretrained(folder)
        write_plots(root / "plots", datasets, trivial)
        write_json(root / "metrics/data.json", metrics)
        (root / QUARANTINE_OF_FAILED_ATTEMPT).unlink(missing_ok=True)
    if not params.data.reads_elsewhere():
        stage.finish(
            "data/prepared",
            "data/tokenizer",
            "metrics/data.json",
            "plots/data_lengths.csv",
            "plots/data_baselines.csv",
        )
    for line in side_by_side(by_use["preference"]):
        logger.info("%s", line)
    counts = ", ".join(f"{len(rows)} {name}/{split}" for name, split, rows in each(datasets))
    logger.info("%d of %d rows refused; prepared %s", len(refusals), metrics["rows_read"], counts)


def clean(
    needs: Sequence[Need], base: PreTrainedTokenizerBase | None, params: Params, root: Path
) -> list[Parsed]:
    """The examples of every table, with prompts of one form, and the rows that were refused.

    Raises DataError if too many are refused, or if conversations and plain prompts are mixed.
    """
    special = SPECIAL_TOKENS if base is None else special_tokens(base)
    rules = TextRules(params.data.max_prompt_chars, params.data.max_response_chars, special)
    parsed = [parse(need, rules) for need in needs]
    for warning in (warning for part in parsed for warning in part.warnings):
        logger.warning("%s", warning)
    refusals = [refusal for part in parsed for refusal in part.refusals]
    refuse_if_too_many(refusals, parsed, params.data, root)
    formed = in_one_form(
        [part.examples for part in parsed], [not need.teaches_tokens for need in needs]
    )
    return [part._replace(examples=found) for part, found in zip(parsed, formed, strict=True)]


def tokenizer_of_world(
    needs: Sequence[Need], parsed: Sequence[Parsed], params: Params
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the tables meant for it. Raises ParamsError if its vocabulary is too
    small for a generated world.
    """
    teaching = [
        example
        for need, part in zip(needs, parsed, strict=True)
        if need.teaches_tokens
        for example in part.examples
    ]
    tokenizer = train_tokenizer(teaching, params)
    refuse_too_large_world(tokenizer, teaching, params)
    return tokenizer


def write_plots(folder: Path, datasets: Datasets, trivial: Mapping[str, Proportion | None]) -> None:
    """Sequence lengths, and the accuracy of trivial predictors."""
    write_csv(
        folder / "data_lengths.csv",
        ("dataset", "split", "tokens", "sequences"),
        length_histogram(datasets),
    )
    write_csv(
        folder / "data_baselines.csv",
        ("baseline", "accuracy", "low", "high"),
        [(name, *p) for name, p in trivial.items() if p is not None],
    )


def refuse_too_large_world(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], params: Params
) -> None:
    """Check that a generated world has a token for each word, and room for its best replies.

    Raises ParamsError with sizes that suffice.
    """
    source, shape = params.data.source, params.model.random
    if not isinstance(source, HelpdeskSource) or shape is None:
        return
    world = world_of(source)
    entries = shape.vocab_size - SMALLEST_VOCABULARY
    if entries < len(world.words):
        enough = len(train_tokenizer(examples, params, UNLIMITED_VOCABULARY))
        raise ParamsError(
            f"model.random.vocab_size={shape.vocab_size} leaves {max(entries, 0)} entries beside "
            f"bytes and special tokens for the {len(world.words)} words of data.source: {enough} "
            "would hold each as one token. Raise it, or lower data.source.world.vocabulary, in "
            "params.yaml."
        )
    context, longest = params.model.context_length, longest_exchange(tokenizer, world)
    if longest > context:
        complete = train_tokenizer(examples, params, UNLIMITED_VOCABULARY)
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
