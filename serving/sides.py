"""The models behind a front: the one that is served, and perhaps a challenger for a share of the conversations."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from serving.engines import Engine, EngineGone
from serving.swap import Swap

CHAMPION = "champion"
"""Name under which requests may ask for whichever model answers their conversation."""


class Sides(NamedTuple):
    """Which engine answers a request."""

    served: Swap
    challenger: Swap | None = None
    share: float = 0.0
    """Of the conversations, those that the challenger answers."""
    compares: bool = False
    """Whether `n: 2` is answered with a reply of each."""

    @property
    def swaps(self) -> tuple[Swap, ...]:
        return (self.served,) if self.challenger is None else (self.served, self.challenger)

    def engines(self) -> list[Engine]:
        """The engines that are up, the served model's first. Raises EngineGone if that is not."""
        up = [swap.engine for swap in self.swaps if swap.engine is not None and swap.engine.is_alive]
        if self.served.engine is None or up[:1] != [self.served.engine]:
            raise EngineGone
        return up

    def engine_of(self, body: Mapping[str, Any]) -> Engine | None:
        """The engine for a request: the model that it names, None if that is not served; else by its conversation.
        While the challenger is not up, the served model answers for it.
        """
        engines, name = self.engines(), body.get("model")
        if name not in (None, CHAMPION):
            return next((engine for engine in engines if engine.name == name), None)
        return engines[-1] if is_within(conversation(body), self.share) else engines[0]


def conversation(body: Mapping[str, Any]) -> str:
    """What identifies a conversation: the user, if the client names one, else its first message."""
    user, messages = body.get("user"), body.get("messages")
    if isinstance(user, str) and user:
        return f"user {user}"
    if isinstance(messages, list):
        first = (m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user")
        return f"said {json.dumps(next(first, None), sort_keys=True)}"
    return f"said {json.dumps(body.get('prompt'), sort_keys=True)}"


def is_within(name: str, share: float) -> bool:
    """Whether a name is of the given share of all names: always the same answer for a name."""
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
