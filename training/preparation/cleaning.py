"""Checks of texts, digests of texts, and quarantine of refused rows.

No row is dropped silently: each refused one becomes a Refusal, and all Refusals go to a quarantine file.
"""

import json
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import DataError
from training.modeling.tokenizer import Prompt, trimmed
from training.process.artifacts import replacing


class Origin(NamedTuple):
    """Position in a source, and the content found there."""

    place: str
    """Path, URL or dataset id."""
    unit: str
    """Unit of `number`: `line` or `row`, from 1."""
    number: int
    column: str
    """The source's own column name; inside a tree, the path to the message."""
    original: Any

    def __str__(self) -> str:
        return f"{self.place} {self.unit} {self.number}" + (f", {self.column}" if self.column else "")


class Refusal(NamedTuple):
    """A refused row, or message of a tree."""

    reason: str
    """A short name of the kind of problem: `empty`, `wrong_type` ..."""
    detail: str
    """Details for people."""
    origin: Origin


class Refused(Exception):
    """Raised while a row is read; caught where its origin is known."""

    def __init__(self, reason: str, column: str, detail: str) -> None:
        super().__init__(f"{column}: {detail}")
        self.reason, self.column, self.detail = reason, column, detail


@dataclass(frozen=True)
class TextRules:
    """Limits for texts."""

    max_prompt_chars: int
    max_response_chars: int
    special_tokens: tuple[str, ...]
    """Spelt out in a text they would end or start a sequence within it."""

    def clean(self, value: Any, column: str) -> str:
        """`value` in Unicode normal form C, with plain line ends, as `trimmed` leaves it.

        Raises Refused if it is not text, empty, not valid Unicode, or spells out a special token.
        """
        if not isinstance(value, str):
            raise Refused("wrong_type", column, f"{type_name(value)} where text is expected")
        text = value if value.isascii() else unicodedata.normalize("NFC", value)
        text = trimmed(text.replace("\r\n", "\n").replace("\r", "\n"))
        if not text:
            raise Refused("empty", column, "empty text")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise Refused("not_unicode", column, f"half of a surrogate pair at character {error.start}") from None
        for token in self.special_tokens:
            if token in text:
                raise Refused("special_token", column, f"spells out the tokenizer's special token {token}")
        return text

    def clean_response(self, value: Any, column: str) -> str:
        text = self.clean(value, column)
        if len(text) > self.max_response_chars:
            raise Refused(
                "response_too_long",
                column,
                f"{len(text)} characters, data.max_response_chars={self.max_response_chars}",
            )
        return text

    def check_prompt_chars(self, chars: int, column: str) -> None:
        if chars > self.max_prompt_chars:
            raise Refused(
                "prompt_too_long", column, f"{chars} characters, data.max_prompt_chars={self.max_prompt_chars}"
            )


def type_name(value: Any) -> str:
    names = {"NoneType": "null", "bool": f"boolean {value}", "dict": "object"}
    kind = type(value).__name__
    return names.get(kind, f"{kind} {value}" if isinstance(value, (int, float)) else kind)


def same_prompt_key(prompt: Prompt) -> str:
    """Key under which equal prompts coincide: a conversation of one user message is the same as its plain text."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return json.dumps(prompt)


# ---------------------------------------------------------------- quarantine


class Quarantine:
    """A file that refused rows are written to as they come, one JSON object a line: reason, detail, source, unit,
    number, column, and the original row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        """Refused rows by reason."""
        self.first: dict[str, Refusal] = {}
        """The first refusal for each reason."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, refusals: Iterable[Refusal]) -> None:
        # backslashreplace writes a lone surrogate as JSON's escape of it
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for refusal in refusals:
                self.counts[refusal.reason] += 1
                self.first.setdefault(refusal.reason, refusal)
                file.write(_quarantine_line(refusal) + "\n")

    def refuse_if_too_many(self, rows_read: int, limit: float, kept: Path) -> None:
        """Fail if more than the fraction `limit` of the rows was refused; the file is then copied to `kept`.

        Raises DataError with the three most frequent reasons, each with its count and first place.
        """
        refused = self.total
        if refused <= limit * rows_read and refused < rows_read:
            return
        named = "; ".join(
            f"{count} {reason} (first: {self.first[reason].origin}: {self.first[reason].detail})"
            for reason, count in self.counts.most_common(3)
        )
        share = refused / rows_read
        some_left = refused < rows_read
        allowed = (
            f"data.max_quarantine_fraction={limit} allows {limit:.1%}" if some_left else "none is left to train on"
        )
        remedy = (
            "Fix the source, or raise the limit in params.yaml"
            if some_left
            else "Fix the source, or data.source in params.yaml"
        )
        with replacing(kept) as temporary:
            shutil.copyfile(self.path, temporary)
        raise DataError(
            f"{refused} of {rows_read} rows ({share:.1%}) were refused, {allowed}: {named}. "
            f"All of them are in {KEPT_QUARANTINE}. {remedy}; data/prepared is unchanged."
        )


def _quarantine_line(refusal: Refusal) -> str:
    origin = refusal.origin
    row: dict[str, Any] = {
        "reason": refusal.reason,
        "detail": refusal.detail,
        "source": origin.place,
        "unit": origin.unit,
        "number": origin.number,
        "column": origin.column,
    }
    try:
        return json.dumps({**row, "original": origin.original}, ensure_ascii=False, default=str)
    # nested too deeply for the writer, or keys that are not text (extra cells of a CSV row)
    except (RecursionError, TypeError):
        return json.dumps({**row, "original": None, "note": f"cannot be copied, see {origin}"}, ensure_ascii=False)


KEPT_QUARANTINE = "runs/data/quarantine.jsonl"
"""Where the refused rows of a failed attempt are."""
