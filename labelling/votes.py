"""The two files of human feedback: pairs to compare, and votes on them, one JSON object a line.

data/labels/pairs.jsonl   prompt, response1, response2, seed, model          written by
                          training/inference/pairs.py
data/labels/votes.jsonl   prompt, response1, response2, annotator, vote ...  read by data.source
with format: votes

A vote is 1 or 2 (the response preferred), 0 (a tie) or null (skipped). Of several votes of an annotator on a pair the
last counts.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from config.errors import DataError, EnvironmentFault
from config.terminal_text import shown

LABELS = Path("data/labels")
PAIRS_FILE = LABELS / "pairs.jsonl"
VOTES_FILE = LABELS / "votes.jsonl"
CUT_LINES_FILE = LABELS / "votes.cut"
"""Where an incomplete last line is kept after a crash."""

VOTES = (0, 1, 2, None)
MAX_ANNOTATOR_CHARS = 60

Prompt = str | list[dict[str, str]]
"""Plain text, or messages with role and content."""


class Pair(NamedTuple):
    """Two responses to a prompt."""

    prompt: Prompt
    response1: str
    response2: str
    seed: int = 0
    """Seed: with the annotator's name and the content it decides which response is shown on the left."""

    @property
    def key(self) -> str:
        """Identifies the content: 16 hexadecimal digits."""
        content = json.dumps([self.prompt, self.response1, self.response2], ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Vote(NamedTuple):
    """An annotator's vote on a pair."""

    pair: Pair
    annotator: str
    vote: int | None
    """1 or 2, the preferred response; 0 a tie; None skipped."""
    left: int | None = None
    """The response shown on the left, 1 or 2; None if unknown."""


def shown_left(pair: Pair, annotator: str) -> int:
    """1 or 2: the response shown to this annotator on the left. A fair coin that gives the same side whenever the page
    is opened.
    """
    return 1 + hashlib.sha256(f"{pair.seed}\n{annotator}\n{pair.key}".encode()).digest()[0] % 2


def annotator_name(name: Any) -> str:
    """`name` in Unicode normal form C, runs of white space as one space.

    Raises DataError for one that is empty, too long, or holds control characters.
    """
    cleaned = " ".join(unicodedata.normalize("NFC", name).split()) if isinstance(name, str) else ""
    if not cleaned or len(cleaned) > MAX_ANNOTATOR_CHARS or not cleaned.isprintable():
        raise DataError(
            f"annotator {shown(name)}: a name has 1 to {MAX_ANNOTATOR_CHARS} printable characters. Choose another."
        )
    return cleaned


# ---------------------------------------------------------------- reading


def read_pairs(path: Path) -> list[Pair]:
    """The pairs in file order, without duplicates; empty if there is no file.

    Raises DataError for a line that is no pair.
    """
    pairs = (_pair(row, f"{path} line {number}") for number, row in _rows(path))
    return list({pair.key: pair for pair in pairs}.values())


def read_votes(path: Path) -> list[Vote]:
    """Every vote, oldest first, replaced ones included; empty if there is no file.

    Raises DataError for a line that is no vote. An incomplete last line is skipped.
    """
    return [_vote(row, f"{path} line {number}") for number, row in _rows(path)]


def current(votes: Iterable[Vote]) -> dict[tuple[str, str], Vote]:
    """(annotator, pair key) -> the vote that counts, the last one; ordered by when it was given."""
    newest: dict[tuple[str, str], Vote] = {}
    for vote in votes:
        key = (vote.annotator, vote.pair.key)
        newest.pop(key, None)
        newest[key] = vote
    return newest


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise DataError(f"{path} line {number} is not JSON ({error}). Fix or remove the line.") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path} line {number} is a {type(row).__name__}, an object is needed. Fix or remove the line."
            )
        yield number, row


def _pair(row: dict[str, Any], place: str) -> Pair:
    prompt, seed = row.get("prompt"), row.get("seed", 0)
    if not is_prompt(prompt):
        raise DataError(f"{place}: prompt is neither text nor messages with role and content. Fix or remove the line.")
    for name in ("response1", "response2"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{place}: {name}={shown(row.get(name))} is not text. Fix or remove the line.")
    return Pair(prompt, row["response1"], row["response2"], seed if isinstance(seed, int) else 0)


def is_prompt(value: Any) -> TypeGuard[Prompt]:
    """Whether `value` is text, or messages with role and content."""
    if isinstance(value, str):
        return bool(value.strip())
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in messages
    )


def _vote(row: dict[str, Any], place: str) -> Vote:
    pair = _pair(row, place)
    try:
        annotator = annotator_name(row.get("annotator"))
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    value = row.get("vote", "")
    if isinstance(value, bool) or value not in VOTES:
        raise DataError(
            f"{place}: vote={shown(value)} is not one of 0 (tie), 1, 2, null (skipped). Fix or remove the line."
        )
    left = row.get("left")
    return Vote(pair, annotator, value, left if left in (1, 2) else None)


# ---------------------------------------------------------------- writing


def append(path: Path, votes: Sequence[Vote], now: float | None = None) -> None:
    """Append votes and flush them to disk; an incomplete last line is moved aside first.

    `now` is the time of the votes in seconds since 1970. Raises EnvironmentFault if the file cannot be written.
    """
    lines = "".join(_line(vote, time.time() if now is None else now) for vote in votes).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _put_cut_line_aside(file.fileno(), path.with_name(CUT_LINES_FILE.name))
            _write(file.fileno(), lines)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror}; the last vote is not kept. Fix that and vote again."
        ) from error


def _line(vote: Vote, now: float) -> str:
    pair = vote.pair
    row = {
        "prompt": pair.prompt, "response1": pair.response1, "response2": pair.response2,
        "annotator": vote.annotator, "vote": vote.vote, "left": vote.left, "time": round(now, 3),
    }  # fmt: skip
    return json.dumps(row) + "\n"


def _write(descriptor: int, lines: bytes) -> None:
    """Write all of `lines` or none: a partial write on a full disk is undone."""
    size = os.fstat(descriptor).st_size
    try:
        while lines:
            lines = lines[os.write(descriptor, lines) :]
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _put_cut_line_aside(descriptor: int, aside: Path) -> None:
    """Terminate the last line if only its newline is missing; else move it to `aside`, so that every remaining line is
    JSON.
    """
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = os.pread(descriptor, size, 0)
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:])
    except ValueError:
        with aside.open("ab") as file:
            file.write(content[start:] + b"\n")
        os.ftruncate(descriptor, start)
    else:
        os.write(descriptor, b"\n")
