"""Converts other layouts to the five formats, row by row, before any check.

pairs         chosen and rejected hold the prompt: as messages, or as text with turns that begin
              with "Human:" and "Assistant:" (hh-rlhf)    -> prompt, chosen, rejected
pairs         rejected is a list of texts                  -> a row for each: best against rest
instructions  messages, or conversations with from/value   -> prompt, completion
trees         prompt, responses, and ranks or scores       -> prompt with ranked replies: all pairs
votes         a winner: A, model_b, tie ...                -> 1, 2, 0; one vote a line is gathered

A row that is in none of its layouts stays as it is, for the checks to refuse.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from training.preparation.sources import SourceRow, Table
from training.preparation.votes import gather

TURN = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):[ \t]*")
SPEAKERS = {"Human": "user", "Assistant": "assistant", "gpt": "assistant", "human": "user"}
MESSAGES = ("messages", "conversations", "conversation")
RESPONSES = ("responses", "completions", "replies", "answers")
ORDERS = ("ranks", "ranking", "rank", "scores", "score", "ratings")
"""Columns, or fields of a response, that order responses: ranks from lowest, others from
highest.
"""

Row = Mapping[str, Any]


def in_format(table: Table, form: str, columns: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """The table with its rows in the layout of `form`, and the columns to read them with."""
    if form == "votes":
        return gather(table, columns)
    present = {name for row in table.rows if isinstance(row.content, dict) for name in row.content}
    if form == "pairs":
        change, extra = _pair_rows(columns, columns["prompt"] not in present), {}
    elif form == "instructions" and columns["prompt"] not in present:
        name = next((name for name in MESSAGES if name in present), None)
        if name is None:
            return table, dict(columns)
        change, extra = _demonstration(name), {"prompt": "prompt", "completion": "completion"}
    elif form == "trees" and (name := next((n for n in RESPONSES if n in present), None)):
        change, extra = _tree(columns, name), {}
    else:
        return table, dict(columns)
    rows = [
        SourceRow(row.number, content)
        for row in table.rows
        for content in (change(row.content) if isinstance(row.content, dict) else [row.content])
    ]
    return table._replace(rows=rows), {**columns, **extra}


def holds_prompt(row: Row, chosen: str, rejected: str) -> bool:
    """Whether two replies of a row include their prompt."""
    return all(_turns(row.get(name)) is not None for name in (chosen, rejected))


def holds_ranked_replies(row: Row) -> bool:
    """Whether a row has several replies and an order for them."""
    return any(_ranks(row, row.get(name)) is not None for name in RESPONSES)


def _pair_rows(columns: Mapping[str, str], no_prompt: bool) -> Callable[[Row], Iterator[Row]]:
    def change(row: Row) -> Iterator[Row]:
        chosen, rejected = row.get(columns["chosen"]), row.get(columns["rejected"])
        if no_prompt:
            before = _common(_turns(chosen) or [], _turns(rejected) or [])
            if before is not None:
                yield {**row, columns["prompt"]: before[0], columns["chosen"]: before[1],
                       columns["rejected"]: before[2]}  # fmt: skip
                return
        if isinstance(rejected, list) and rejected and all(isinstance(r, str) for r in rejected):
            yield from ({**row, columns["rejected"]: each} for each in rejected)
            return
        yield row

    return change


def _common(chosen: Sequence[Row], rejected: Sequence[Row]) -> tuple[list[Row], str, str] | None:
    """The conversation before the last assistant messages of two conversations, and their texts;
    None if they differ earlier.
    """
    *before, last = chosen or [{}]
    *other, worse = rejected or [{}]
    speakers = {last.get("role"), worse.get("role")}
    if not before or before != other or speakers != {"assistant"}:
        return None
    return before, last["content"], worse["content"]


def _turns(value: Any) -> list[Row] | None:
    """Messages from a list or from a text of turns; None for anything else."""
    if isinstance(value, list):
        messages = [_message(item) for item in value]
        return None if None in messages or not messages else [m for m in messages if m is not None]
    if not isinstance(value, str):
        return None
    _, *parts = TURN.split(value)
    return [
        {"role": SPEAKERS[who], "content": text.strip()}
        for who, text in zip(parts[::2], parts[1::2], strict=True)
    ] or None


def _message(item: Any) -> Row | None:
    if not isinstance(item, dict):
        return None
    if {"role", "content"} <= item.keys():
        return item
    if {"from", "value"} <= item.keys():
        return {"role": SPEAKERS.get(item["from"], item["from"]), "content": item["value"]}
    return None


def _demonstration(name: str) -> Callable[[Row], Iterator[Row]]:
    def change(row: Row) -> Iterator[Row]:
        *before, last = _turns(row.get(name)) or [{}]
        if before and last.get("role") == "assistant":
            yield {"prompt": before, "completion": last["content"]}
        else:
            yield row

    return change


def _tree(columns: Mapping[str, str], responses: str) -> Callable[[Row], Iterator[Row]]:
    def change(row: Row) -> Iterator[Row]:
        prompt, replies = row.get(columns["prompt"]), row.get(responses)
        ranks = _ranks(row, replies)
        if not isinstance(prompt, str) or ranks is None:
            yield row
            return
        assert isinstance(replies, list)
        below = [
            {columns["text"]: _text(reply), columns["role"]: "assistant", columns["rank"]: rank}
            for reply, rank in zip(replies, ranks, strict=True)
        ]
        root = {columns["text"]: prompt, columns["role"]: "user", columns["replies"]: below}
        yield {columns["prompt"]: root}

    return change


def _ranks(row: Row, replies: Any) -> list[int] | None:
    """The rank of each reply, 0 the best, ties equal; None without a complete order."""
    if not isinstance(replies, list):
        return None
    for name in ORDERS:
        values = row.get(name)
        if not isinstance(values, list):
            values = [reply.get(name) if isinstance(reply, dict) else None for reply in replies]
        if len(values) == len(replies) and all(_is_number(value) for value in values):
            sign = 1 if name.startswith("rank") else -1
            order = sorted({sign * value for value in values})
            return [order.index(sign * value) for value in values]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(reply: Any) -> Any:
    if not isinstance(reply, dict):
        return reply
    return next((reply[name] for name in ("text", "content", "response") if name in reply), None)
