"""From configured sources to examples: which table serves which dataset, how it is parsed, and how
many rows may be refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from config.errors import DataError, ParamsError
from config.schema import Params
from config.sections.data import (
    NO_PREFERENCES,
    Data,
    FileSource,
    HelpdeskSource,
    HubSource,
    PythonSource,
    Source,
)
from training.preparation import helpdesk
from training.preparation.cleaning import (
    Origin,
    Refusal,
    Refused,
    TextRules,
    check_quarantine_fraction,
    write_quarantine,
)
from training.preparation.columns import COLUMNS, check_columns, column_names
from training.preparation.doubts import doubts
from training.preparation.formats import Example, Parsed, example_of
from training.preparation.layouts import FORMATS, PYTHON
from training.preparation.rows import USES
from training.preparation.sources import SourceRow, Table, read_file, read_hub, read_python
from training.preparation.trees import parse_tree
from training.preparation.votes import read_vote_lines

QUARANTINE_OF_FAILED_ATTEMPT = "runs/data/quarantine.jsonl"


class Need(NamedTuple):
    """A table, and the datasets that its examples serve."""

    table: Table
    form: str
    columns: Mapping[str, str]
    uses: tuple[str, ...]
    vote: str | None = None
    """The convention of its winners, if the user names it."""
    refused: tuple[Refusal, ...] = ()
    """Lines that are not rows."""
    teaches_tokens: bool = True
    """Whether a trained tokenizer learns from its examples."""


HELPDESK_FORMATS = {"sft": "instructions", "preference": "pairs", "prompts": "prompts"}

SERVING_FORMATS = {
    "sft": ("pairs", "ranked", "votes", "trees", "instructions"),
    "preference": ("pairs", "ranked", "votes", "trees"),
    "prompts": ("pairs", "ranked", "votes", "trees", "instructions", "prompts"),
}


def read_sources(params: Params, root: Path) -> list[Need]:
    """The tables of the configured sources; data.source serves every dataset without its own
    source.

    Raises DataError as training/preparation/sources.py does, and ParamsError for a format that
    gives nothing for its dataset.
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
    """Additional preferences. The tokenizer does not learn from them, so that new votes change
    neither the tokenizer nor the SFT model.
    """
    setting = "data.vote_source"
    table, refused = read_vote_lines(source, root, setting)
    columns = column_names(source.format, source.columns, setting)
    if table.rows:
        check_columns(table, source.format, columns, setting)
    return [
        Need(
            table,
            source.format,
            columns,
            ("preference",),
            source.vote,
            tuple(refused),
            teaches_tokens=False,
        )
    ]


def _needs(
    source: Source, setting: str, uses: tuple[str, ...], seed: int, root: Path
) -> list[Need]:
    if isinstance(source, HelpdeskSource):
        world = helpdesk.generate(source, seed)._asdict()
        return [_helpdesk_need(use, world[use], setting, seed) for use in uses]
    if isinstance(source, PythonSource):
        return [Need(read_python(source, root, setting), PYTHON, {}, uses)]
    if source.format in NO_PREFERENCES:  # config.schema has checked that none are needed
        uses = tuple(use for use in uses if use != "preference")
    for use in uses:
        if FORMATS[source.format][0] not in SERVING_FORMATS[use]:
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
    check_columns(table, source.format, columns, setting)
    return [Need(table, source.format, columns, uses, source.vote)]


def _helpdesk_need(use: str, rows: Sequence[Mapping[str, str]], setting: str, seed: int) -> Need:
    table = Table(
        f"{setting} helpdesk (seed {seed}), {use}",
        "row",
        [SourceRow(i, row) for i, row in enumerate(rows, start=1)],
    )
    form = HELPDESK_FORMATS[use]
    return Need(table, form, column_names(form, {}, setting), (use,))


def parse_table(
    table: Table, form: str, columns: Mapping[str, str], vote: str | None, rules: TextRules
) -> Parsed:
    """The examples of a table and the rows that were refused, whatever its layout.

    Raises DataError if it has winners that can be read in two ways.
    """
    gives, reader = FORMATS[form]
    names = columns or COLUMNS.get(gives, {})
    examples: list[Example] = []
    refusals: list[Refusal] = []
    rows_read = unranked = trees = 0
    for row, made in reader(table, names, vote):
        try:
            if isinstance(made, Refused):
                raise made
            if gives == "trees":
                part = parse_tree(table, row, made["prompt"], names, rules)
                examples += part.examples
                refusals += part.refusals
                rows_read += part.rows_read - 1
                unranked += part.replies_unranked
                trees += 1
            else:
                origin = Origin(table.place, table.unit, row.number, "", row.content)
                examples.append(example_of(made, names, rules, origin))
        except Refused as refused:
            origin = Origin(table.place, table.unit, row.number, refused.column, row.content)
            refusals.append(Refusal(refused.reason, refused.detail, origin))
        rows_read += 1
    ties = sum(not example.pairs for example in examples) if gives == "votes" else 0
    return Parsed(rows_read, examples, refusals, ties, unranked, trees, doubts(table, examples))


def parse(need: Need, rules: TextRules) -> Parsed:
    """The same for a table already read, with its lines that are not rows."""
    found = parse_table(need.table, need.form, need.columns, need.vote, rules)
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
    """Pairs added by data.vote_source, before removing duplicates."""
    return sum(
        len(example.pairs)
        for need, part in zip(needs, parsed, strict=True)
        if not need.teaches_tokens
        for example in part.examples
    )


def refuse_if_too_many(
    refusals: Sequence[Refusal], parsed: Sequence[Parsed], settings: Data, root: Path
) -> None:
    """Fail above `data.max_quarantine_fraction`; the refused rows are then in runs/data, and the
    prepared data is kept.

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
