"""Limits of a request, checked before it costs anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BODY_BYTES = 4 * 2**20
MAX_TEMPERATURE = 10.0


class BadRequest(Exception):
    """A mistake of the client: HTTP status, field, and one line with the fix."""

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


@dataclass(frozen=True)
class Sampling:
    """How a reply is sampled."""

    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float
    seed: int | None
    stream: bool
    include_usage: bool = False
    """A streamed reply ends with a chunk of token counts."""


def sampling(body: Mapping[str, Any], prompt_tokens: int, context_length: int) -> Sampling:
    """The validated settings of a request. Without max_tokens the reply may fill the context.

    Raises BadRequest with the field, the value and the rule.
    """
    room = context_length - prompt_tokens
    if room < 1:
        raise BadRequest(
            "messages",
            f"the prompt has {prompt_tokens} tokens, and the context of {context_length} leaves no "
            "room for a reply. Send a shorter one.",
        )
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    most = _number(body, name, room, int, 1, room)
    if body.get("n", 1) != 1:
        raise BadRequest("n", f"n={body['n']!r} must be 1. Send one request per reply.")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequest("seed", f"seed={seed!r} is not an integer.")
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise BadRequest("stream", f"stream={stream!r} must be true or false.")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise BadRequest(
            "stream_options",
            f"stream_options={options!r:.80} must be an object, with stream: true.",
        )
    return Sampling(
        max_tokens=int(most),
        temperature=_number(body, "temperature", 1.0, float, 0.0, MAX_TEMPERATURE),
        top_p=_number(body, "top_p", 1.0, float, 1e-6, 1.0),
        seed=seed,
        stream=stream,
        include_usage=options.get("include_usage") is True,
    )


def _number(
    body: Mapping[str, Any], name: str, default: float, kind: type, low: float, high: float
) -> float:
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and not isinstance(value, int)) or not low <= value <= high:
        raise BadRequest(name, f"{name}={value!r} must be a number from {low:g} to {high:g}.")
    return float(value)


def messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a chat request, each with a role and a text. Raises BadRequest."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest("messages", "messages must be a list of at least one message.")
    found = []
    for place, message in enumerate(given):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):  # content as parts, which some clients send
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise BadRequest(
                "messages", f"messages[{place}] needs a role and a text as its content."
            )
        found.append({"role": message["role"], "content": content})
    return found
