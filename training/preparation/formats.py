"""From rows in any of the five formats to examples: a prompt and its known replies.

pairs         prompt, chosen, rejected             -> one pair
votes         prompt, response1, response2, votes  -> one pair, or none where no reply has the
              majority (training/preparation/votes.py: one vote a line)
trees         conversations with ranked replies    -> training/preparation/trees.py
instructions  prompt, completion                   -> one demonstration
prompts       prompt (or a bare JSON string)       -> the prompt alone
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from config.errors import DataError, ParamsError
from training.modeling.tokenizer import Message, Prompt, prompt_text
from training.preparation.cleaning import (
    Origin,
    Refusal,
    Refused,
    TextRules,
    same_prompt_key,
    same_text_key,
)
from training.preparation.sources import SourceRow, Table

COLUMNS = {
    "pairs": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "votes": {
        "prompt": "prompt",
        "response1": "response1",
        "response2": "response2",
        "annotators": "annotator1, annotator2, annotator3",
    },
    "trees": {
        "prompt": "prompt",
        "text": "text",
        "role": "role",
        "rank": "rank",
        "replies": "replies",
    },
    "instructions": {"prompt": "prompt", "completion": "completion"},
    "prompts": {"prompt": "prompt"},
}
"""Our columns per format -> the name expected in the source unless `columns` says otherwise."""

OPTIONAL = ("input",)
"""Read only if `columns` names it: text appended to the prompt after an empty line."""
ONE_VOTE = ("annotator", "vote")
"""Columns of the votes format with one vote per row, with or without an annotator."""
WINNER = re.compile(
    r"(?:model|response|assistant|answer|output|reply|option|completion)?[ _-]?"
    r"(?:(?P<first>1|a|first|left)|(?P<second>2|b|second|right)|(?P<tie>0|tie.*|both.*|neither.*|"
    r"equal|same|none))"
)
"""How votes are written: 1, A, model_a, response_1, left ..."""

ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "prompter": "user",
    "human": "user",
}
"""Role names of sources -> TRL's."""


class Pair(NamedTuple):
    chosen: str
    rejected: str
    chosen_first: bool | None
    """Whether the source showed the preferred reply first; None if unknown."""


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt with its replies. Compared by identity: equal texts may occur at several places."""

    origin: Origin
    prompt: Prompt
    pairs: tuple[Pair, ...] = ()
    completions: tuple[str, ...] = ()
    """Replies worth imitating, best first."""


class Parsed(NamedTuple):
    """Result of parsing a source. Every row is in `examples` or in `refusals`."""

    rows_read: int
    """Rows, or messages of trees: the units that can be refused."""
    examples: list[Example]
    refusals: list[Refusal]
    ties: int = 0
    """Votes without a majority: their prompts are kept."""
    replies_unranked: int = 0
    """Unranked replies in trees, which give no pairs."""
    trees: int = 0


def column_names(form: str, given: Mapping[str, str], setting: str) -> dict[str, str]:
    """Our column -> the source's, for a format.

    Raises ParamsError if `given` names a column the format does not have.
    """
    known = [
        *COLUMNS[form],
        *(OPTIONAL if form != "trees" else ()),
        *(ONE_VOTE if form == "votes" else ()),
    ]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
            raise ParamsError(
                f"{setting}.columns.{name} is not a column of format {form}; {hint} Change it in "
                "params.yaml."
            )
    one = {"annotators": given["vote"]} if "vote" in given and "annotator" not in given else {}
    return {**COLUMNS[form], **given, **one}


def annotator_columns(columns: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in columns["annotators"].split(",") if name.strip()]


def check_columns(table: Table, form: str, columns: Mapping[str, str], setting: str) -> None:
    """Check that every column occurs in some row.

    Raises DataError with the first missing column and the existing ones.
    """
    present: dict[str, None] = {}
    for row in table.rows:
        if isinstance(row.content, dict):
            present.update((str(name), None) for name in row.content if name is not None)
    if form == "prompts" and any(isinstance(row.content, str) for row in table.rows):
        return
    needed = {
        ours: theirs
        for ours, theirs in columns.items()
        if ours not in ("annotators", *ONE_VOTE) and (form != "trees" or ours == "prompt")
    }
    votes = [("annotators", name) for name in annotator_columns(columns)] if form == "votes" else []
    for ours, theirs in [*needed.items(), *votes]:
        if theirs not in present:
            there = ", ".join(present) if present else "none: its rows are not objects"
            raise DataError(
                f"{table.place} has no column {theirs!r}, which format {form} needs as {ours}; "
                f"columns present: {there}. "
                f"Set {setting}.columns.{ours} or {setting}.format in params.yaml."
            )


def parse_rows(table: Table, form: str, columns: Mapping[str, str], rules: TextRules) -> Parsed:
    """The examples of a flat format (any but trees), and the rows that were refused."""
    examples, refusals = [], []
    for row in table.rows:
        try:
            examples.append(_example(table, row, form, columns, rules))
        except Refused as refused:
            origin = Origin(table.place, table.unit, row.number, refused.column, row.content)
            refusals.append(Refusal(refused.reason, refused.detail, origin))
    ties = sum(not example.pairs for example in examples) if form == "votes" else 0
    return Parsed(len(table.rows), examples, refusals, ties)


def _example(
    table: Table, row: SourceRow, form: str, columns: Mapping[str, str], rules: TextRules
) -> Example:
    content = (
        {columns["prompt"]: row.content}
        if form == "prompts" and isinstance(row.content, str)
        else row.content
    )
    if not isinstance(content, dict):
        raise Refused(
            "wrong_type", "", f"{type(content).__name__} where an object with columns is expected"
        )
    if None in content:
        raise Refused("field_count", "", content[None])
    fields = Fields(content, columns, rules)
    prompt = fields.prompt()
    pairs: tuple[Pair, ...] = ()
    completions: tuple[str, ...] = ()
    match form:
        case "pairs":
            pairs = (Pair(*fields.two_replies(prompt, "chosen", "rejected"), None),)
        case "votes":
            first, second = fields.two_replies(prompt, "response1", "response2")
            winner = majority(
                [vote for name in annotator_columns(columns) for vote in fields.votes(name)]
            )
            if winner:
                pairs = (Pair(first, second, True) if winner == 1 else Pair(second, first, False),)
        case "instructions":
            completions = (fields.reply(prompt, "completion"),)
    origin = Origin(table.place, table.unit, row.number, columns["prompt"], row.content)
    return Example(origin, prompt, pairs, completions or tuple(pair.chosen for pair in pairs))


def majority(votes: Sequence[int]) -> int:
    """1 or 2, the reply that more than half of all annotators prefer; 0 if there is none (a vote of
    0 is a tie).
    """
    return next(
        (reply for reply in (1, 2) if 2 * sum(vote == reply for vote in votes) > len(votes)), 0
    )


@dataclass(frozen=True)
class Fields:
    """The checked columns of one row, by our names. Every method raises Refused."""

    content: Mapping[str, Any]
    columns: Mapping[str, str]
    rules: TextRules

    def value(self, name: str) -> Any:
        """A cell, by the source's column name."""
        if name not in self.content:
            raise Refused("missing_column", name, "this row has no such column")
        return self.content[name]

    def prompt(self) -> Prompt:
        name = self.columns["prompt"]
        value = self.value(name)
        prompt: Prompt = (
            self.conversation(value, name)
            if isinstance(value, list)
            else self.rules.clean(value, name)
        )
        if isinstance(prompt, str):
            prompt = "\n\n".join([prompt, *self._input()])
        elif prompt[-1]["role"] != "user":
            raise Refused(
                "role", name, f"the conversation ends with {prompt[-1]['role']}, not with the user"
            )
        self.rules.check_prompt_chars(len(prompt_text(prompt)), name)
        return prompt

    def _input(self) -> list[str]:
        """Text appended to the prompt; empty or absent is usual."""
        if "input" not in self.columns:
            return []
        value = self.content.get(self.columns["input"])
        return (
            []
            if value is None or (isinstance(value, str) and not value.strip())
            else [self.rules.clean(value, self.columns["input"])]
        )

    def conversation(self, messages: list[Any], name: str) -> list[Message]:
        if not messages:
            raise Refused("empty", name, "a conversation without messages")
        return [message(item, f"{name}[{i}]", self.rules) for i, item in enumerate(messages)]

    def reply(self, prompt: Prompt, column: str) -> str:
        """A reply: text, or a list of messages that ends with the assistant's and may repeat the
        prompt before it.
        """
        name = self.columns[column]
        value = self.value(name)
        if not isinstance(value, list):
            return self.rules.clean_response(value, name)
        *before, last = self.conversation(value, name)
        if last["role"] != "assistant":
            raise Refused("role", name, f"the reply is by {last['role']}, not by the assistant")
        if before and same_prompt_key(before) != same_prompt_key(prompt):
            raise Refused(
                "other_prompt", name, "the conversation before the reply is not the prompt"
            )
        return self.rules.clean_response(last["content"], name)

    def two_replies(self, prompt: Prompt, first: str, second: str) -> tuple[str, str]:
        replies = self.reply(prompt, first), self.reply(prompt, second)
        if same_text_key(replies[0]) == same_text_key(replies[1]):
            raise Refused(
                "identical_replies", self.columns[second], "both replies are the same text"
            )
        return replies

    def votes(self, name: str) -> list[int]:
        """The vote in a column, or a tuple gathered by training/preparation/votes.py, which no file
        can contain.
        """
        value = self.value(name)
        return (
            [self.vote(item, name) for item in value]
            if isinstance(value, tuple)
            else [self.vote(value, name)]
        )

    def vote(self, value: Any, name: str) -> int:
        if isinstance(value, str) and (found := WINNER.fullmatch(value.strip().lower())):
            return 1 if found["first"] else 2 if found["second"] else 0
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value in (0, 1, 2):
            return int(value)
        raise Refused("not_a_vote", name, f"{value!r} is not one of 0 (tie), 1, 2, A, B, tie")


def message(
    item: Any, column: str, rules: TextRules, text: str = "content", role: str = "role"
) -> Message:
    """A checked message; `text` and `role` are the source's names.

    Raises Refused.
    """
    if not isinstance(item, dict):
        raise Refused("wrong_type", column, f"{type(item).__name__} where a message is expected")
    for name in (text, role):
        if name not in item:
            raise Refused("missing_column", f"{column}.{name}", "this message has no such field")
    if not isinstance(item[role], str) or item[role] not in ROLES:
        raise Refused(
            "role", f"{column}.{role}", f"{item[role]!r} is not one of {', '.join(ROLES)}"
        )
    return {"role": ROLES[item[role]], "content": rules.clean(item[text], f"{column}.{text}")}
