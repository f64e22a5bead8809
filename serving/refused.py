"""Requests that are refused before they reach an engine or the store."""

import json
from typing import Any


class Refused(Exception):
    """HTTP status, field, and one line with the fix."""

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises Refused."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused("", f"the request is not JSON ({error}).") from None
    if not isinstance(body, dict):
        raise Refused("", f"the request is a {type(body).__name__}; an object is needed.")
    return body
