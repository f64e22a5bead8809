"""From our own rows, which a layout gives, to examples: a prompt and its known replies.

pairs         prompt, chosen, rejected             -> one pair
ranked        prompt, replies, ranks (0 is best)   -> a pair for every two of unequal rank
votes         prompt, response1, response2, votes  -> one pair, or none where no reply has the
              majority; a vote is 1, 2 or 0 for a tie
trees         a prompt that is a message with replies -> training/preparation/trees.py
ratings       prompt, completion, good             -> one rated reply, a demonstration if it is good
instructions  prompt, completion                   -> one demonstration
prompts       prompt                               -> the prompt alone
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from training.modeling.tokenizer import Message, Prompt, prompt_text
from training.preparation.cleaning import Origin, Refused, TextRules
from training.preparation.conversations import turn, turns

Row = Mapping[str, Any]


class Pair(NamedTuple):
    chosen: str
    rejected: str
    chosen_first: bool | None
    """Whether the source showed the preferred reply first; None if unknown."""


class Rating(NamedTuple):
    """A reply that somebody called good or bad."""

    completion: str
    label: bool


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """A prompt with its replies. Compared by identity: equal texts may occur at several places."""

    origin: Origin
    prompt: Prompt
    pairs: tuple[Pair, ...] = ()
    completions: tuple[str, ...] = ()
    """Replies worth imitating, best first."""
    columns: Mapping[str, Any] | None = None
    """The other columns of a row of ratings, instructions or prompts, for a reward function."""
    ratings: tuple[Rating, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Example, (self.origin, self.prompt, self.pairs, self.completions, self.columns, self.ratings)


REPLIES: Mapping[str, Callable[[Example], list[dict[str, Any]]]] = {
    "sft": lambda example: [{"completion": text} for text in example.completions],
    "preference": lambda example: [{"chosen": pair.chosen, "rejected": pair.rejected} for pair in example.pairs],
    "ratings": lambda example: [rating._asdict() for rating in example.ratings],
    "prompts": lambda example: [{}],
}
"""Dataset -> the reply columns of each row that an example gives it, as TRL names them."""

USES = tuple(REPLIES)


def replies_of(example: Example) -> list[str]:
    """The texts of all replies."""
    rated = (rating.completion for rating in example.ratings)
    return [*example.completions, *(text for pair in example.pairs for text in pair[:2]), *rated]


def example_of(row: Row, columns: Mapping[str, str], rules: TextRules, origin: Origin) -> Example:
    """The example of a row of ours; `columns` are the source's names of its fields, where they differ.

    Raises Refused.
    """
    checked = _Checked(row, columns, rules)
    prompt = checked.prompt()
    pairs: tuple[Pair, ...] = ()
    completions: tuple[str, ...] = ()
    ratings: tuple[Rating, ...] = ()
    others = None
    if "chosen" in row:
        pairs = (Pair(*checked.two_replies("chosen", "rejected"), None),)
    elif "votes" in row:
        first, second = checked.two_replies("response1", "response2")
        winner = majority(row["votes"])
        if winner:
            pairs = (Pair(first, second, True) if winner == 1 else Pair(second, first, False),)
    elif "ranks" in row:
        replies = [checked.reply(text, "replies") for text in row["replies"]]
        ranked = sorted(zip(row["ranks"], replies, strict=True), key=lambda ranked_reply: ranked_reply[0])
        pairs = pairs_of(ranked)
        completions = tuple(text for _, text in ranked[:1])
    else:
        others = other_columns(origin.original, columns)
        if "completion" in row:
            reply = checked.reply(row["completion"], "completion")
            ratings = (Rating(reply, row["good"]),) if "good" in row else ()
            if row.get("good", True):
                completions, others = (reply,), {"completion": reply, **others}
    imitated = completions or tuple(pair.chosen for pair in pairs)
    return Example(origin, prompt, pairs, imitated, others, ratings)


def other_columns(original: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """The other columns of a source's row, as JSON values."""
    if not isinstance(original, dict):
        return {}
    used = {"prompt", "completion", *columns.values()}
    others = {name: value for name, value in original.items() if name not in used}
    content: dict[str, Any] = json.loads(json.dumps(others, default=str))
    return content


def pairs_of(ranked: Sequence[tuple[float | None, str]]) -> tuple[Pair, ...]:
    """A pair for every two replies of unequal rank; they come in the order of their ranks."""
    return tuple(
        Pair(better, worse, None)
        for (rank, better), (other, worse) in combinations(ranked, 2)
        if rank != other and better != worse
    )


def majority(votes: Sequence[int]) -> int:
    """1 or 2, the reply that more than half of all annotators prefer; 0 if there is none (a vote of 0 is a tie)."""
    return next((reply for reply in (1, 2) if 2 * sum(vote == reply for vote in votes) > len(votes)), 0)


@dataclass(frozen=True)
class _Checked:
    """The checked fields of a row. Every method raises Refused."""

    row: Row
    columns: Mapping[str, str]
    rules: TextRules

    def prompt(self) -> Prompt:
        name, value = self.columns.get("prompt", "prompt"), self.row["prompt"]
        prompt: Prompt
        if isinstance(value, list):
            prompt = [
                {**message, "content": self.rules.clean(message["content"], f"{name}[{i}].content")}
                for i, message in enumerate(turns(value, name))
            ]
            if prompt[-1]["role"] != "user":
                raise Refused(f"ends_with_{prompt[-1]['role']}", name, "the last message is not the user's")
        else:
            prompt = self.rules.clean(value, name)
        self.rules.check_prompt_chars(len(prompt_text(prompt)), name)
        return prompt

    def reply(self, text: Any, field: str) -> str:
        return self.rules.clean_response(text, self.columns.get(field, field))

    def two_replies(self, first: str, second: str) -> tuple[str, str]:
        replies = self.reply(self.row[first], first), self.reply(self.row[second], second)
        if replies[0] == replies[1]:
            name = self.columns.get(second, second)
            raise Refused("identical_replies", name, "both replies are the same text")
        return replies


def message(item: Any, column: str, rules: TextRules, text: str = "content", role: str = "role") -> Message:
    """A checked message; `text` and `role` are the source's names.

    Raises Refused.
    """
    parsed = turn(item, column, text, role)
    return {**parsed, "content": rules.clean(parsed["content"], f"{column}.{text}")}
