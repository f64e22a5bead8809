"""The client of foreign endpoints: a key goes to the named origin alone, and into no message."""

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An endpoint that moves is an error: its new address would get the key and the questions."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """POSTs JSON below one base URL."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float) -> None:
        self.url, self._key, self._timeout_seconds = url.rstrip("/"), key, timeout_seconds
        self._opener = urllib.request.build_opener(_NoRedirects)

    def post(self, path: str, body: bytes) -> Any:
        """The JSON of the answer. Raises HTTPError, OSError and ValueError."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(f"{self.url}/{path}", body, headers)
        with self._opener.open(request, timeout=self._timeout_seconds) as response:
            return json.loads(response.read())

    def words(self, error: Exception) -> str:
        """A fault in one line, without the key."""
        if isinstance(error, urllib.error.HTTPError):
            text = f"HTTP {error.code} {error.read(500).decode('utf-8', 'replace')}"
            if location := error.headers.get("Location"):
                text = f"HTTP {error.code}: it redirects to {location}. Name that address if it is meant"
        else:
            text = str(error) or type(error).__name__
        text = " ".join(text.split())
        return text.replace(self._key, "***") if self._key else text


def retry_after_seconds(headers: Message) -> float | None:
    """The pause that a server asks for: seconds, with fractions too, or a date; None without one.

    Source: RFC 9110, section 10.2.3.
    """
    text = headers.get("Retry-After", "").strip()
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
