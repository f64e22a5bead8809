"""Recognises the layout of a table and the meaning of its columns."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from config.errors import DataError, ParamsError
from config.terminal_text import shown
from training.preparation.conversations import SPELT, is_conversation
from training.preparation.layouts import LOOKED_AT, MESSAGES, ORDERS, REPLIES, UNPAIRED, published
from training.preparation.sources import Table
from training.preparation.thumbs import NAMES, is_certain
from training.preparation.votes import ANNOTATOR, VOTE, annotator_columns

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "pairs": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "ranked": {"prompt": "prompt"},
    "rated": {"prompt": "prompt", "completion": "completion", "score": "score"},
    "ratings": {"prompt": "prompt", "completion": "completion", "label": "label"},
    "votes": {
        "prompt": "prompt",
        "response1": "response1",
        "response2": "response2",
        "annotators": "annotator1, annotator2, annotator3",
    },
    "trees": {"prompt": "prompt", "text": "text", "role": "role", "rank": "rank", "replies": "replies"},
    "instructions": {"prompt": "prompt", "completion": "completion"},
    "prompts": {"prompt": "prompt"},
}
"""Our columns per format -> the name expected in the source unless `columns` says otherwise. The other formats have
columns of their own.
"""

BEFORE = {"input": ("input",), "system": ("system", "system_prompt"), "history": ("history",)}
"""Columns that are read only if `columns` names them -> their names in files: text below the prompt, the system's
turn, and earlier turns, each a question with its answer.
"""
ONE_VOTE = (ANNOTATOR, VOTE)
"""Columns of the votes format with one vote per row, with or without an annotator."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "question", "query", "context", "user", "input", "text"),
    "chosen": ("chosen", "preferred", "accepted", "chosen_response", "response_chosen", "better"),
    "rejected": ("rejected", "dispreferred", "rejected_response", "response_rejected", "worse"),
    "response1": ("response1", "response_1", "response_a", "answer_a", "output_1", "reply_a"),
    "response2": ("response2", "response_2", "response_b", "answer_b", "output_2", "reply_b"),
    "completion": ("completion", "response", "answer", "output", "reply", "solution"),
    "label": (*NAMES, "label", "rating", "feedback", "vote"),
}
"""Our column -> common names in files, likeliest first."""

ANNOTATORS = re.compile(r"(annotator|vote|label|rater|judge)[ _]?\d+$", re.IGNORECASE)
WINNERS = ("winner", "vote", "preference", "preferred", "choice", "label")
"""Names of a column with the preferred one of two replies."""
VERDICT = re.compile(
    r"(?:.*[ _-])?(?:winner|preference|preferred|labels?|ranks?|ranking|scores?|ratings?|votes?|"
    r"chosen|rejected|better|best|worse)(?:[ _-].*|\d*)",
    re.IGNORECASE,
)
REPLY = re.compile(
    r"(?:.*[ _-])?(?:responses?|answers?|repl(?:y|ies)|completions?|outputs?|predictions?|"
    r"candidates?|generations?|left|right)(?:[ _-]?\w{1,6})?",
    re.IGNORECASE,
)
"""Names of columns with a verdict, and with a reply."""
ID = re.compile(r"[+-]?\d+(?:\.\d+)?|[A-Za-z_:-]*\d[\w:-]*")
OF_PREFERENCES = ("winner", "preference", "preferred", "chosen", "rejected", "rank", "ranks")


GUESSED = ("pairs", "ranked", "votes", "trees", "ratings", "instructions", "prompts")
"""Formats that a table's columns can be recognised as, in this order."""


class NoLayout(DataError):
    """A table that is in no layout."""

    def __init__(self, message: str, first: Any) -> None:
        super().__init__(message)
        self.first = first
        """Its first row."""


def names_of(rows: Iterable[Any]) -> list[str]:
    """The columns of some rows, in their order."""
    objects = (row for row in rows if isinstance(row, dict))
    return list(dict.fromkeys(name for row in objects for name in row if name is not None))


def columns_of(table: Table) -> list[str]:
    """The columns of a table, in their order."""
    return names_of(row.content for row in table.rows)


def column_names(form: str, given: Mapping[str, str], setting: str) -> dict[str, str]:
    """Our column -> the source's, for a format.

    Raises ParamsError if `given` names a column the format does not have.
    """
    if form not in COLUMNS:
        if given:
            raise ParamsError(
                f"{setting}.columns: format {form} has columns of its own, none can be named. "
                "Leave them out in params.yaml."
            )
        return {}
    names = [*COLUMNS[form], *(BEFORE if form != "trees" else ()), *(ONE_VOTE if form == "votes" else ())]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}."
            raise ParamsError(
                f"{setting}.columns.{name} is not a column of format {form}; {hint} Change it in params.yaml."
            )
    single = {"annotators": given[VOTE]} if VOTE in given and ANNOTATOR not in given else {}
    return {**COLUMNS[form], **given, **single}


def check_columns(table: Table, form: str, columns: Mapping[str, str], setting: str) -> None:
    """Check that every column occurs in some row, and that prompts are texts.

    Raises DataError with the first missing column and the existing ones.
    """
    rows = table.first(LOOKED_AT)
    if form == "prompts" and any(isinstance(row, str) for row in rows):
        return
    first = next((row for row in rows if isinstance(row, dict)), {})
    present = names_of(rows)
    if _missing(form, columns, present, first) is not None:
        present = columns_of(table)
    missing = _missing(form, columns, present, first)
    if missing is not None:
        ours, theirs = missing
        names = ", ".join(present) if present else "none: its rows are not objects"
        raise DataError(
            f"{table.place} has no column {shown(theirs)}, which format {form} needs as {ours}; columns present: "
            f"{names}. Set {setting}.columns.{ours.split()[0]} or {setting}.format in params.yaml."
        )
    prompt_column = columns.get("prompt")
    prompts = [row[prompt_column] for row in rows if isinstance(row, dict) and prompt_column in row]
    ids = [prompt for prompt in prompts if _is_id(prompt)]
    if prompt_column is not None and 2 * len(ids) > len(prompts):
        raise DataError(
            f"{table.place}: the prompts in column {shown(prompt_column)} are numbers or ids, such as "
            f"{shown(ids[0])}. Name the column of the texts: {setting}.columns.prompt, or "
            "--column prompt=COLUMN."
        )


def _missing(
    form: str, columns: Mapping[str, str], present: Sequence[str], first: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The first column of ours that is needed and whose name in the source is not there."""
    # without a prompt column the replies hold the prompt
    whole = columns.get("prompt") not in present and (
        form == "pairs"
        or (form == "votes" and is_conversation(first.get(columns["response1"])))
        or (form == "instructions" and bool(set(MESSAGES) & set(present)))
    )
    unneeded = {"annotators", *ONE_VOTE, *BEFORE, *({"prompt", "completion"} if whole else ())}
    needed = {
        ours: theirs
        for ours, theirs in columns.items()
        if ours not in unneeded and (form != "trees" or ours == "prompt")
    }
    one_vote = {columns.get(name, name) for name in ONE_VOTE}
    if form == "votes" and not one_vote <= set(present):
        needed |= {f"annotators ({name})": name for name in annotator_columns(columns)}
    return next(((ours, theirs) for ours, theirs in needed.items() if theirs not in present), None)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and ID.fullmatch(value.strip()) is not None)


class Recognised(NamedTuple):
    form: str
    columns: Mapping[str, str]
    """Ours -> the table's."""
    vote: str | None = None
    name: str | None = None
    """Name of a published layout."""


def recognised(table: Table, form: str | None, columns: Mapping[str, str]) -> Recognised:
    """Format and columns from column names and values; `form` and `columns` are what the user named.

    Raises NoLayout with the existing columns and what each format needs.
    """
    rows = table.first(LOOKED_AT)
    if form is None and not columns:
        if any(isinstance(row, str) for row in rows):
            return Recognised("prompts", {})
        if (layout := published(rows)) is not None:
            if layout.name == UNPAIRED and _are_thumbs(row for row in rows if isinstance(row, dict)):
                return Recognised("ratings", {}, None, layout.name)
            return Recognised(layout.form, layout.columns, layout.vote, layout.name)
    present = columns_of(table)
    mappings = [row for row in rows if isinstance(row, dict)]
    first = next(iter(rows), None)
    candidates = GUESSED if form is None else [form] if form in GUESSED else []
    for candidate in candidates:
        mapped = _mapping(candidate, present, mappings, columns)
        if mapped is None:
            continue
        if form is None:
            _refuse_guess(candidate, present, {*mapped.values()}, table.place, first)
        if VOTE in columns and ANNOTATOR not in columns:
            mapped.pop("annotators", None)
        return Recognised(candidate, {**mapped, **columns})
    if form is not None:  # check_columns reports what is missing
        return Recognised(form, dict(columns))
    needs = "; ".join(f"{name}: {', '.join(COLUMNS[name])}" for name in GUESSED)
    raise NoLayout(
        f"{table.place}: its columns ({', '.join(present) or 'none: its rows are no objects'}) are "
        f"in no known layout. What the formats need: {needs}. {_advice(table.place)}",
        first,
    )


def _are_thumbs(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the labels are true or false, and no prompt has several replies, which would be pairs."""
    labels = [(repr(row.get("prompt")), row.get("label")) for row in rows]
    return len(dict(labels)) == len(labels) and all(isinstance(label, bool) for _, label in labels)


def _advice(place: str) -> str:
    return (
        "Name them, as in --format pairs --column prompt=COLUMN --column chosen=COLUMN --column rejected=COLUMN; "
        f"or read them by a function: rlhf init NAME --data {place} writes one to fill in."
    )


def _refuse_guess(form: str, present: Sequence[str], read: Iterable[str], place: str, first: Any) -> None:
    """Votes must not be left unread. Raises NoLayout for prompts beside verdicts or
    replies, and for demonstrations beside preferences.
    """
    unread = [name for name in present if name not in read]
    verdicts = [name for name in unread if VERDICT.fullmatch(name)]
    replies = [name for name in unread if REPLY.fullmatch(name)]
    if form == "instructions":
        verdicts = [name for name in unread if name.lower() in OF_PREFERENCES]
        replies = [name for name in replies if name not in MESSAGES]
    elif form != "prompts":
        return
    if verdicts or len(replies) > 1:
        raise NoLayout(
            f"{place}: it could be read as {form}, but {', '.join(dict.fromkeys(verdicts + replies))} look like "
            f"preferences and would be left unread. {_advice(place)} --format {form} reads it without them.",
            first,
        )


def _mapping(
    form: str, present: Sequence[str], rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> dict[str, str] | None:
    """Our columns -> the table's, None if the table is not in this format."""
    lower = {name.lower(): name for name in reversed(present)}
    columns_by_ours = {
        ours: columns.get(ours) or next((lower[n] for n in SYNONYMS[ours] if n in lower), None)
        for ours in COLUMNS[form]
        if ours in SYNONYMS
    }
    talks = next((name for name in MESSAGES if name in present), None)
    has_pairs = form == "pairs" and None not in (columns_by_ours["chosen"], columns_by_ours["rejected"])
    if has_pairs and columns_by_ours["prompt"] is None:
        columns_by_ours["prompt"] = talks or "prompt"
    if form == "instructions" and talks is not None and None in columns_by_ours.values():
        return {}
    if None in columns_by_ours.values():
        return None
    named = {ours: theirs for ours, theirs in columns_by_ours.items() if theirs is not None}
    prompt_column = named["prompt"]
    if form == "trees" and not any(
        isinstance(row.get(prompt_column), dict) and "replies" in row[prompt_column] for row in rows
    ):
        return None
    if form == "ranked" and not any(_holds_order(row) for row in rows):
        return None
    label = named.get("label", "")
    if label and "label" not in columns and not all(is_certain(row[label], label) for row in rows if label in row):
        return None
    one_vote = {columns.get(name, name) for name in ONE_VOTE}
    if form == "votes" and not one_vote <= set(present):
        annotators = (
            columns.get("annotators")
            or columns.get(VOTE)
            or ", ".join(filter(ANNOTATORS.match, present))
            or next((lower[name] for name in WINNERS if name in lower), "")
        )
        if not annotators:
            return None
        named["annotators"] = annotators
    if form != "trees":
        named |= {
            ours: columns.get(ours) or lower[next(n for n in names if n in lower)]
            for ours, names in BEFORE.items()
            if ours in columns
            or (any(n in lower for n in names) and prompt_column not in {lower.get(n) for n in names}
                and (ours != "input" or prompt_column in ("instruction", "question")))
        }  # fmt: skip
    return named


def _holds_order(row: Mapping[str, Any]) -> bool:
    """Whether a row has several replies, and something that orders them."""
    for name in REPLIES:
        replies = row.get(name)
        spelt = isinstance(replies, str) and SPELT.match(replies)
        if spelt or (isinstance(replies, list) and replies):
            inside = replies[0] if isinstance(replies, list) else None
            fields = {*row, *(inside if isinstance(inside, dict) else ())}
            return any(order in fields for order in ORDERS)
    return False
