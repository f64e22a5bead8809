"""Stage `data`: from a source of preferences to clean rows in TRL's forms, split by prompt, and the
tokenizer.

params.yaml (seed, model, data) and the source -> data/prepared, data/tokenizer, metrics/data.json,
plots/data_*.csv
"""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from config.errors import DataError, ParamsError
from config.schema import Params
from config.sections.data import Data, FileSource, HelpdeskSource, HubSource, Source
from training.modeling.tokenizer import (
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    encode_prompts,
    encode_responses,
    pretrained_tokenizer,
    trained_tokenizer,
)
from training.preparation import helpdesk
from training.preparation.cleaning import (
    Refusal,
    TextRules,
    check_quarantine_fraction,
    write_quarantine,
)
from training.preparation.formats import Example, Parsed, check_columns, column_names, parse_rows
from training.preparation.rows import (
    USES,
    crowded_out,
    each,
    in_one_form,
    make_dataset,
    prompt_tokens,
    refuse_empty_splits,
    write_prepared,
)
from training.preparation.sources import SourceRow, Table, local_files, read_file, read_hub
from training.preparation.splits import SPLITS, split_of
from training.preparation.summary import (
    baselines,
    duplicate_metrics,
    flat,
    gold_metrics,
    label_balance,
    length_histogram,
    reply_pairs,
    row_counts,
    source_metrics,
    token_lengths,
)
from training.preparation.trees import parse_trees
from training.preparation.votes import gather, read_vote_lines
from training.preparation.worlds import World, world_of
from training.process.artifacts import replacing, write_csv, write_json
from training.process.stage import Stage, run_stage

logger = logging.getLogger("training.data")  # as a process this module is called __main__

SECTIONS = ("seed", "model", "data")
EXCHANGES = 2000
"""Prompts by which the longest exchange of a generated world is found."""
UNLIMITED_VOCABULARY = 1 << 16
QUARANTINE_OF_FAILED_ATTEMPT = "runs/data/quarantine.jsonl"


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
        special_tokens = SPECIAL_TOKENS if base is None else tuple(base.all_special_tokens)
        rules = TextRules(
            params.data.max_prompt_chars, params.data.max_response_chars, special_tokens
        )
        parsed = [parse(need, rules) for need in needs]
        refusals = [refusal for part in parsed for refusal in part.refusals]
        refuse_if_too_many(refusals, parsed, params.data, root)
        formed = in_one_form(
            [part.examples for part in parsed], [not need.teaches_tokens for need in needs]
        )
        parsed = [
            part._replace(examples=examples) for part, examples in zip(parsed, formed, strict=True)
        ]
        work.add(sequences=sum(part.rows_read for part in parsed))
    stage.stop_if_requested()
    # 3. the tokenizer, the prompts that leave no room for a response, and the three datasets
    with stage.meter.phase("tokenise", 0) as work:
        examples = [example for part in parsed for example in part.examples]
        teaching = [
            example
            for need, part in zip(needs, parsed, strict=True)
            if need.teaches_tokens
            for example in part.examples
        ]
        tokenizer = base or train_tokenizer(teaching, params)
        if base is None:
            refuse_too_large_world(tokenizer, teaching, params)
        tokens = prompt_tokens(tokenizer, examples)
        crowded = {
            example: crowded_out(example, tokens[example], params.model.context_length)
            for example in examples
        }
        refusals += [refusal for refusal in crowded.values() if refusal is not None]
        refuse_if_too_many(refusals, parsed, params.data, root)
        by_use = {
            use: [
                example for example in examples_for(use, needs, parsed) if crowded[example] is None
            ]
            for use in USES
        }
        datasets = {
            use: make_dataset(use, by_use[use], params.data.test_fraction, tokenizer, tokens)
            for use in USES
        }
        refuse_empty_splits(datasets, params.data.test_fraction)
        sequences = [
            length for *_, rows in each(datasets) for row in rows for length in row.sequence_tokens
        ]
        work.add(sum(sequences), len(sequences))
    stage.stop_if_requested()
    # 4. what a reward model has to beat, and everything else people ask about data
    with stage.meter.phase("summarise", 0):
        pairs = {split: reply_pairs(datasets["preference"][split]) for split in SPLITS}
        trivial = baselines(pairs)
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
            "vote_pairs": (votes := vote_pairs(needs, parsed)),
            **gold_metrics(datasets, params.data, labels_known=not votes),
            "vocab_size": len(tokenizer),
        }
    stage.stop_if_requested()
    stage.check_params()
    # 5. everything in place
    with stage.meter.phase("write", 0):
        write_prepared(root / "data/prepared", datasets, refusals)
        with replacing(root / "data/tokenizer") as folder:
            tokenizer.save_pretrained(folder)
        write_csv(
            root / "plots/data_lengths.csv",
            ("dataset", "split", "tokens", "sequences"),
            length_histogram(datasets),
        )
        write_csv(
            root / "plots/data_baselines.csv",
            ("baseline", "accuracy", "low", "high"),
            [(name, *p) for name, p in trivial.items()],
        )
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
    counts = ", ".join(f"{len(rows)} {name}/{split}" for name, split, rows in each(datasets))
    logger.info("%d of %d rows refused; prepared %s", len(refusals), metrics["rows_read"], counts)


class Need(NamedTuple):
    """A table that was read, and which datasets its examples serve."""

    table: Table
    form: str
    columns: Mapping[str, str]
    uses: tuple[str, ...]
    refused: tuple[Refusal, ...] = ()
    """Lines that are no rows."""
    teaches_tokens: bool = True
    """Whether a tokenizer that is trained learns from its examples."""


HELPDESK_FORMATS = {"sft": "instructions", "preference": "pairs", "prompts": "prompts"}

SERVING_FORMATS = {
    "sft": ("pairs", "votes", "trees", "instructions"),
    "preference": ("pairs", "votes", "trees"),
    "prompts": ("pairs", "votes", "trees", "instructions", "prompts"),
}


def read_sources(params: Params, root: Path) -> list[Need]:
    """The tables of the configured sources; data.source serves every dataset that has no source of
    its own.

    Raises DataError as training/preparation/sources.py does, and ParamsError for a format that has
    nothing for its dataset.
    """
    settings = params.data
    own = {
        "sft": ("data.sft_source", settings.sft_source),
        "prompts": ("data.prompt_source", settings.prompt_source),
    }
    shared = tuple(use for use in USES if use not in own or own[use][1] is None)
    needs = _needs(settings.source, "data.source", shared, params.seed, root)
    for use, (setting, source) in own.items():
        if source is not None:
            needs += _needs(source, setting, (use,), params.seed, root)
    return needs + ([] if settings.vote_source is None else _vote_needs(settings.vote_source, root))


def _vote_needs(source: FileSource, root: Path) -> list[Need]:
    """Preferences that come on top. They teach no tokens, so that new votes leave the tokenizer,
    and with it the SFT model, as it is.
    """
    setting = "data.vote_source"
    table, refused = read_vote_lines(source, root, setting)
    columns = column_names(source.format, source.columns, setting)
    if table.rows:
        if source.format == "votes":
            table, columns = gather(table, columns)
        check_columns(table, source.format, columns, setting)
    return [
        Need(table, source.format, columns, ("preference",), tuple(refused), teaches_tokens=False)
    ]


def _needs(
    source: Source, setting: str, uses: tuple[str, ...], seed: int, root: Path
) -> list[Need]:
    if isinstance(source, HelpdeskSource):
        world = helpdesk.generate(source, seed)._asdict()
        return [_helpdesk_need(use, world[use], setting, seed) for use in uses]
    for use in uses:
        if source.format not in SERVING_FORMATS[use]:
            raise ParamsError(
                f"{setting}.format={source.format} has no rows for the {use} data, which needs one "
                "of "
                f"{', '.join(SERVING_FORMATS[use])}. Change the format or the source in "
                "params.yaml."
            )
    columns = column_names(source.format, source.columns, setting)
    table = (
        read_hub(source, setting)
        if isinstance(source, HubSource)
        else read_file(source, root, setting)
    )
    if source.format == "votes":
        table, columns = gather(table, columns)
    check_columns(table, source.format, columns, setting)
    return [Need(table, source.format, columns, uses)]


def _helpdesk_need(use: str, rows: Sequence[Mapping[str, str]], setting: str, seed: int) -> Need:
    table = Table(
        f"{setting} helpdesk (seed {seed}), {use}",
        "row",
        [SourceRow(i, row) for i, row in enumerate(rows, start=1)],
    )
    form = HELPDESK_FORMATS[use]
    return Need(table, form, column_names(form, {}, setting), (use,))


def parse(need: Need, rules: TextRules) -> Parsed:
    """The examples of a table and the rows that were refused."""
    if need.form == "trees":
        found = parse_trees(need.table, need.columns, rules)
    else:
        found = parse_rows(need.table, need.form, need.columns, rules)
    return found._replace(
        rows_read=found.rows_read + len(need.refused), refusals=[*need.refused, *found.refusals]
    )


def examples_for(use: str, needs: Sequence[Need], parsed: Sequence[Parsed]) -> list[Example]:
    return [
        example
        for need, part in zip(needs, parsed, strict=True)
        if use in need.uses
        for example in part.examples
    ]


def vote_pairs(needs: Sequence[Need], parsed: Sequence[Parsed]) -> int:
    """Pairs that data.vote_source added, before duplicates are dropped."""
    return sum(
        len(example.pairs)
        for need, part in zip(needs, parsed, strict=True)
        if not need.teaches_tokens
        for example in part.examples
    )


def refuse_if_too_many(
    refusals: Sequence[Refusal], parsed: Sequence[Parsed], settings: Data, root: Path
) -> None:
    """Fail above `data.max_quarantine_fraction`; the refused rows are then found in runs/data, the
    prepared data stays.

    Raises DataError.
    """
    rows_read = sum(part.rows_read for part in parsed)
    try:
        check_quarantine_fraction(
            refusals, rows_read, settings.max_quarantine_fraction, QUARANTINE_OF_FAILED_ATTEMPT
        )
    except DataError:
        write_quarantine(root / QUARANTINE_OF_FAILED_ATTEMPT, refusals)
        raise


def refuse_too_large_world(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], params: Params
) -> None:
    """A generated world has a token for each of its words, and its best replies have room.

    Raises ParamsError with the sizes that would do.
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
            "would hold each whole. Raise it, or lower data.source.world.vocabulary, in "
            "params.yaml."
        )
    context, longest = params.model.context_length, longest_exchange(tokenizer, world)
    if longest > context:
        whole = train_tokenizer(examples, params, UNLIMITED_VOCABULARY)
        or_vocabulary = (
            f", and so would model.random.vocab_size={len(whole)}"
            if longest_exchange(whole, world) <= context
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


def train_tokenizer(
    examples: Iterable[Example], params: Params, vocab_size: int | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of `model.random.vocab_size` entries, or as many as asked for, learnt from the
    train split alone.
    """
    assert params.model.random is not None
    train = [
        example
        for example in examples
        if split_of(example.prompt, params.data.test_fraction) == "train"
    ]
    replies = [
        text
        for example in train
        for text in (*example.completions, *(text for pair in example.pairs for text in pair[:2]))
    ]
    prompts = [example.prompt for example in train]
    return trained_tokenizer(
        replies, vocab_size or params.model.random.vocab_size, params.data.prompt_template, prompts
    )


if __name__ == "__main__":
    sys.exit(run_stage("data", SECTIONS, local_files, data))
