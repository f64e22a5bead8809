"""What the front keeps of its replies, and what people say of them: `POST /v1/feedback`.

{"id": ..., "rating": "up" | "down", "comment"?, "user"?}    of a reply
{"chosen": ..., "rejected": ..., "comment"?, "user"?}        of two replies to one prompt

A request is answered once its feedback is on disk. One thread does all of the store's work.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from prometheus_client import Counter

from config.workspace.feedback import DOWN, UP, FeedbackStore, KeptReply, UnknownReply
from serving.account import Tokens
from serving.refused import Refused, json_object

FEEDBACK_PATH = "/v1/feedback"
MAX_FEEDBACK_BYTES = 64 * 2**10
MAX_NAME_CHARS = 200
KINDS = RATING, COMPARISON = ("id", "rating"), ("chosen", "rejected")
"""The fields that each kind of feedback needs."""
T = TypeVar("T")


class Said(NamedTuple):
    """A checked body."""

    replies: tuple[str, ...]
    """One reply that is rated, or the better one and the other."""
    rating: str | None
    comment: str
    user: str


def parsed(raw: bytes) -> Said:
    """The feedback in a request. Raises Refused."""
    if len(raw) > MAX_FEEDBACK_BYTES:
        raise Refused("", f"the request has {len(raw)} bytes; {MAX_FEEDBACK_BYTES} are allowed.")
    body = json_object(raw)
    kind = next((kind for kind in KINDS if set(kind) <= body.keys()), None)
    if kind is None:
        raise Refused("id", "id and rating are needed, or chosen and rejected.")
    for field in body:
        if field not in (*kind, "comment", "user"):
            raise Refused(
                str(field)[:100], f"{str(field)[:100]!r} is no field here: {', '.join(kind)}, comment, user are."
            )
    for field, value in body.items():
        most = MAX_FEEDBACK_BYTES if field == "comment" else MAX_NAME_CHARS
        if not isinstance(value, str) or len(value) > most or (field in kind and not value):
            raise Refused(field, f"{field} has to be a text of at most {most} characters.")
        if any(not (char.isprintable() or (field == "comment" and char in "\n\t")) for char in value):
            raise Refused(field, f"{field} has control characters; leave them out.")
    first, second = (body[field] for field in kind)
    about = body.get("comment", ""), body.get("user", "")
    if kind == COMPARISON:
        return Said((first, second), None, *about)
    if second not in (UP, DOWN):
        raise Refused("rating", f"rating={second[:100]!r} is neither {UP} nor {DOWN}.")
    return Said((first,), second, *about)


class Feedback:
    """The store of a front that keeps replies."""

    def __init__(self, root: Path, days: float, words: Counter) -> None:
        """`days` is how long replies are kept that nobody rated; `words` counts by model and kind.

        Raises EnvironmentFault if the store cannot be used.
        """
        self._store, self._days, self._words = FeedbackStore(root), days, words
        self._thread = ThreadPoolExecutor(1, "feedback")

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def keep(self, run_id: str, request: Mapping[str, Any], reply: "Heard", tokens: Tokens) -> None:
        """Keep the reply to a request."""
        prompt = request.get("messages", request.get("prompt"))
        user = request.get("user")
        kept = KeptReply(
            reply.id, run_id, user if isinstance(user, str) else "", prompt, reply.text, tokens.prompt, tokens.reply
        )
        if reply.id:
            await self._in_thread(self._store.keep, kept)

    async def say(self, said: Said) -> None:
        """Store a rating or comparison. Raises Refused for an unknown reply, or two replies to different prompts."""
        try:
            if said.rating is not None:
                run_id: str | None = await self._in_thread(
                    self._store.rate, said.replies[0], said.user, said.rating, said.comment
                )
            else:
                run_id = await self._in_thread(self._store.prefer, *said.replies, said.user, said.comment)
        except UnknownReply as error:
            message = f"{str(error)[:100]!r} is no reply that is kept: it has expired, or was never given."
            raise Refused("id" if said.rating else "chosen", message, 404) from None
        if run_id is None:
            raise Refused("rejected", "the two replies answer different prompts.")
        self._words.labels(run_id, said.rating or "better").inc()

    async def expire(self) -> None:
        """Remove what is older than the days and was not rated."""
        await self._in_thread(self._store.expire, self._days)

    def close(self) -> None:
        self._thread.submit(self._store.close)
        self._thread.shutdown()


class Heard:
    """The first choice of an answer, put together from its chunks."""

    def __init__(self) -> None:
        self.id = ""
        self._parts: list[str] = []

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Heard":
        """Of a whole answer."""
        heard = cls()
        heard.add(content)
        return heard

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, content: Mapping[str, Any]) -> None:
        """A whole answer, or a chunk."""
        self.id = content.get("id") or self.id
        for choice in content.get("choices") or ():
            if choice.get("index", 0) == 0:
                message = choice.get("delta") or choice.get("message") or {}
                self._parts.append(message.get("content") or choice.get("text") or "")
