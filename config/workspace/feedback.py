"""What people said of served replies: .rlhf/feedback.db, an SQLite file of mode 600 with a write-ahead log.

replies   a kept reply: prompt, text, model, time, tokens. Removed after some days unless somebody rated it.
words     what was said, one row after another, never changed: a rating of a reply, or that it is better than another.
          Of several words of a user on a reply, or on two, the last counts.

data/labels/feedback.jsonl is a copy for training, made when a run starts: ratings and pairs, without names.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault

FEEDBACK = Path(".rlhf/feedback.db")
SNAPSHOT = Path("data/labels/feedback.jsonl")
UP, DOWN = "up", "down"
SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
  id TEXT PRIMARY KEY, time REAL NOT NULL, run_id TEXT NOT NULL, user TEXT NOT NULL, prompt TEXT NOT NULL,
  reply TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, reply_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS words (
  number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, user TEXT NOT NULL,
  reply TEXT NOT NULL REFERENCES replies (id) ON DELETE CASCADE,
  other TEXT REFERENCES replies (id) ON DELETE CASCADE, rating TEXT, comment TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS words_by_reply ON words (reply);
CREATE INDEX IF NOT EXISTS words_by_other ON words (other);
"""
COUNTING = """
SELECT w.* FROM words w JOIN (
  SELECT max(number) AS number FROM words
  GROUP BY user, min(reply, coalesce(other, reply)), max(reply, coalesce(other, reply))
) last USING (number)
"""
"""The last word of each user on a reply, or on two."""


class KeptReply(NamedTuple):
    """A reply and where it came from."""

    id: str
    run_id: str
    user: str
    """As the client names them; empty if it does not."""
    prompt: Any
    """Messages, or a text."""
    reply: str
    prompt_tokens: int
    reply_tokens: int


class VersionSummary(NamedTuple):
    """What was said of one model's replies."""

    run_id: str
    replies: int
    rated: int
    """Words that count, of all users."""
    up: int
    reasons: tuple[str, ...]
    """Comments on bad replies, the newest first."""


class UnknownReply(Exception):
    """No kept reply has this id."""


class FeedbackStore:
    """The store of a project. Use it from one thread."""

    def __init__(self, root: Path) -> None:
        """Raises EnvironmentFault if the file cannot be opened, or others can read it."""
        path = root / FEEDBACK
        try:
            path.parent.mkdir(exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            if (mode := path.stat().st_mode & 0o777) & 0o077:
                raise EnvironmentFault(f"{path} has mode {mode:o}: other users can read it. Set it: chmod 600 {path}.")
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise EnvironmentFault(f"{path} cannot be used ({error}). Move it away to begin anew.") from None
        self._root = root

    def close(self) -> None:
        self._db.close()

    def keep(self, reply: KeptReply) -> None:
        """Add a reply."""
        row = reply._replace(prompt=json.dumps(reply.prompt, ensure_ascii=False))
        self._db.execute(
            "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (row[0], time.time(), *row[1:])
        )

    def rate(self, reply: str, user: str, rating: str, comment: str) -> str:
        """Add a rating, UP or DOWN; returns the run of the reply's model. Raises UnknownReply."""
        run_id, _ = self._reply(reply)
        self._say(user, reply, None, rating, comment)
        return run_id

    def prefer(self, chosen: str, rejected: str, user: str, comment: str) -> str | None:
        """Add that a reply is better than another to the same prompt; returns the run of the better one, None where
        the prompts differ. Raises UnknownReply.
        """
        (run_id, prompt), (_, other) = self._reply(chosen), self._reply(rejected)
        if prompt != other:
            return None
        self._say(user, chosen, rejected, None, comment)
        return run_id

    def _reply(self, reply: str) -> tuple[str, str]:
        row = self._db.execute("SELECT run_id, prompt FROM replies WHERE id = ?", (reply,)).fetchone()
        if row is None:
            raise UnknownReply(reply)
        return row[0], row[1]

    def _say(self, user: str, reply: str, other: str | None, rating: str | None, comment: str) -> None:
        values = (time.time(), user, reply, other, rating, comment)
        self._db.execute(
            "INSERT INTO words (time, user, reply, other, rating, comment) VALUES (?, ?, ?, ?, ?, ?)", values
        )

    def expire(self, days: float) -> int:
        """Remove replies older than this that nobody spoke of; returns how many."""
        spoken = "SELECT reply FROM words UNION SELECT other FROM words WHERE other IS NOT NULL"
        before = time.time() - 86400 * days
        return self._db.execute(f"DELETE FROM replies WHERE time < ? AND id NOT IN ({spoken})", (before,)).rowcount

    def forget(self, user: str | None, reply: str | None) -> tuple[int, float | None]:
        """Remove a user's replies and words, or a reply with all that was said of it; returns how many replies and
        words went, and when the first of the words was said. The snapshot follows.
        """
        said = self._db.execute(
            "SELECT count(*), min(w.time) FROM words w WHERE w.user = :user OR w.reply = :reply OR w.other = :reply "
            "OR w.reply IN (SELECT id FROM replies WHERE user = :user) "
            "OR w.other IN (SELECT id FROM replies WHERE user = :user)",
            {"user": user, "reply": reply},
        ).fetchone()
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DELETE FROM words WHERE user = ?", (user,))
        gone = self._db.execute("DELETE FROM replies WHERE user = ? OR id = ?", (user, reply)).rowcount
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if (self._root / SNAPSHOT).exists():
            self.snapshot()
        return gone + said[0], said[1]

    def rows(self) -> Iterator[dict[str, Any]]:
        """What counts, for training, oldest first: {prompt, completion, label} of a rating, {prompt, chosen, rejected}
        of a comparison.
        """
        counting = self._db.execute(
            f"SELECT w.rating, a.prompt, a.reply, b.reply FROM ({COUNTING}) w JOIN replies a ON a.id = w.reply "
            "LEFT JOIN replies b ON b.id = w.other ORDER BY w.number"
        )
        for rating, prompt, reply, other in counting:
            content = {"completion": reply, "label": rating == UP} if rating else {"chosen": reply, "rejected": other}
            yield {"prompt": _plain(json.loads(prompt)), **content}

    def snapshot(self) -> None:
        """Write the copy for training, if it differs."""
        target = self._root / SNAPSHOT
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, text)
            target.chmod(0o600)

    def summary(self) -> list[VersionSummary]:
        """What was said of each model's replies, the newest model first."""
        versions = self._db.execute("SELECT run_id, count(*) FROM replies GROUP BY run_id ORDER BY max(time) DESC")
        result = []
        for run_id, replies in versions.fetchall():
            said = self._db.execute(
                f"SELECT w.rating, w.comment FROM ({COUNTING}) w JOIN replies r ON r.id = w.reply "
                "WHERE r.run_id = ? AND w.rating IS NOT NULL ORDER BY w.number DESC",
                (run_id,),
            ).fetchall()
            reasons = tuple(comment for rating, comment in said if rating == DOWN and comment)
            result.append(VersionSummary(run_id, replies, len(said), sum(r == UP for r, _ in said), reasons))
        return result


def _plain(prompt: Any) -> Any:
    """A single message of the user as the text that it is, as data without conversations has it."""
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0].get("role") == "user":
        return prompt[0]["content"]
    return prompt


def renew_snapshot(root: Path) -> None:
    """Write the copy for training of a project that has a store."""
    if (root / FEEDBACK).exists():
        with closing(FeedbackStore(root)) as store:
            store.snapshot()
