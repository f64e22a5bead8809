"""From configured sources to examples: which table serves which dataset, and how it is parsed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import ParamsError
from config.schema import Params
from config.sections.data import NO_PREFERENCES, FileSource, HelpdeskSource, HubSource, PythonSource, Source
from training.preparation.ahead import made_ahead
from training.preparation.cleaning import Origin, Refusal, Refused, TextRules
from training.preparation.columns import COLUMNS, check_columns, column_names
from training.preparation.doubts import Doubts
from training.preparation.formats import USES, Example, example_of
from training.preparation.layouts import FORMATS, PYTHON
from training.preparation.sources import SourceRow, Table, read_file, read_hub, read_python, source_rows
from training.preparation.trees import parse_tree
from training.preparation.votes import read_vote_lines
from training.worlds import helpdesk


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
    """Whether a trained tokenizer learns from its examples; not from votes, which are added to what the other sources
    give.
    """
    follows: bool = False
    """Whether its conversations are refused where all other prompts are plain."""

    def reading(self, rules: TextRules) -> "Reading":
        return Reading(self.table, self.form, self.columns, self.vote, rules)


HELPDESK_FORMATS = {"sft": "instructions", "preference": "pairs", "prompts": "prompts"}

SERVING_FORMATS = {
    "sft": ("pairs", "ranked", "votes", "trees", "ratings", "instructions"),
    "preference": ("pairs", "ranked", "votes", "trees"),
    "ratings": ("ratings",),
    "prompts": ("pairs", "ranked", "votes", "trees", "ratings", "instructions", "prompts"),
}


def read_sources(params: Params, root: Path) -> list[Need]:
    """The tables of the configured sources; data.source serves every dataset without its own source.

    Raises DataError as training/preparation/sources.py does, and ParamsError for a format that gives nothing for its
    dataset.
    """
    settings = params.data
    separate = {
        "sft": ("data.sft_source", settings.sft_source),
        "prompts": ("data.prompt_source", settings.prompt_source),
    }
    shared = tuple(use for use in USES if use not in separate or separate[use][1] is None)
    needs = _needs(settings.source, "data.source", shared, params.seed, root)
    for use, (setting, source) in separate.items():
        if source is not None:
            needs += _needs(source, setting, (use,), params.seed, root)
    needs += [] if settings.vote_source is None else _vote_needs(settings.vote_source, root)
    return needs + ([] if settings.feedback_source is None else _feedback_needs(settings.feedback_source, root))


def _vote_needs(source: FileSource, root: Path) -> list[Need]:
    """Additional preferences. The tokenizer does not learn from them, so that new votes change neither the tokenizer
    nor the SFT model.
    """
    setting = "data.vote_source"
    table, refused = read_vote_lines(source, root, setting)
    columns = column_names(source.format, source.columns, setting)
    if table.rows:
        check_columns(table, source.format, columns, setting)
    return [Need(table, source.format, columns, ("preference",), source.vote, tuple(refused), teaches_tokens=False)]


def _feedback_needs(path: str, root: Path) -> list[Need]:
    """Ratings and pairs of config/workspace/feedback.py."""
    source = FileSource(kind="file", path=path, format="pairs", columns={})
    table, refused = read_vote_lines(source, root, "data.feedback_source")
    uses = ("preference", "ratings")
    return [Need(table, PYTHON, {}, uses, None, tuple(refused), teaches_tokens=False, follows=True)]


def _needs(source: Source, setting: str, uses: tuple[str, ...], seed: int, root: Path) -> list[Need]:
    if isinstance(source, HelpdeskSource):
        return [_helpdesk_need(use, source, setting, seed) for use in uses if use in HELPDESK_FORMATS]
    if isinstance(source, PythonSource):
        return [Need(read_python(source, root, setting), PYTHON, {}, uses)]
    gives = FORMATS[source.format][0]
    # config.schema has checked that there are the preferences or ratings that are needed
    absent = ("ratings", *(("preference",) if source.format in NO_PREFERENCES else ()))
    uses = tuple(use for use in uses if use not in absent or gives in SERVING_FORMATS[use])
    for use in uses:
        if gives not in SERVING_FORMATS[use]:
            raise ParamsError(
                f"{setting}.format={source.format} has no rows for the {use} data, "
                f"which needs one of {', '.join(SERVING_FORMATS[use])}. Change the format or the source in "
                "params.yaml."
            )
    columns = column_names(source.format, source.columns, setting)
    table = read_hub(source, setting) if isinstance(source, HubSource) else read_file(source, root, setting)
    check_columns(table, source.format, columns, setting)
    return [Need(table, source.format, columns, uses, source.vote)]


def _helpdesk_need(use: str, source: HelpdeskSource, setting: str, seed: int) -> Need:
    rows = helpdesk.ROWS[use]
    table = Table(
        f"{setting} helpdesk (seed {seed}), {use}",
        "row",
        source_rows(
            lambda: enumerate(made_ahead(lambda: rows(source, seed)), start=1), f"{setting} has no rows for {use}."
        ),
    )
    form = HELPDESK_FORMATS[use]
    return Need(table, form, column_names(form, {}, setting), (use,))


class Reading:
    """The examples of a table and its refused rows, one after another. The counts are complete once all have been
    read.
    """

    def __init__(
        self, table: Table, form: str, columns: Mapping[str, str], vote: str | None, rules: TextRules
    ) -> None:
        self._table, self._vote, self._rules = table, vote, rules
        self._gives, self._reader = FORMATS[form]
        self._columns = columns or COLUMNS.get(self._gives, {})
        self._doubts = Doubts(table.unit)
        self.rows_read = 0
        """Rows, or messages of trees: the units that can be refused."""
        self.ties = 0
        """Votes without a majority: their prompts are kept."""
        self.replies_unranked = 0
        """Unranked replies in trees, which give no pairs."""
        self.trees = 0

    @property
    def warnings(self) -> list[str]:
        """What may be wrong with the rows as a whole, a line each."""
        return list(self._doubts.lines())

    def __iter__(self) -> Iterator[Example | Refusal]:
        """Raises DataError if the table cannot be read to its end, or has winners that can be read in two ways."""
        before = None
        for row, content in self._reader(self._table, self._columns, self._vote):
            if row is not before:
                self._doubts.row(row)
            before = row
            for item in self._items(row, content):
                if isinstance(item, Example):
                    self._doubts.example(item)
                yield item

    def _items(self, row: SourceRow, content: Mapping[str, Any] | Refused) -> list[Any]:
        table = self._table
        try:
            if isinstance(content, Refused):
                raise content
            if self._gives == "trees":
                tree = parse_tree(table, row, content["prompt"], self._columns, self._rules)
                self.rows_read += tree.messages
                self.replies_unranked += tree.unranked
                self.trees += 1
                return [*tree.examples, *tree.refusals]
            self.rows_read += 1
            origin = Origin(table.place, table.unit, row.number, "", row.content)
            example = example_of(content, self._columns, self._rules, origin)
            self.ties += self._gives == "votes" and not example.pairs
            return [example]
        except Refused as refused:
            self.rows_read += content is refused
            origin = Origin(table.place, table.unit, row.number, refused.column, row.content)
            return [Refusal(refused.reason, refused.detail, origin)]
