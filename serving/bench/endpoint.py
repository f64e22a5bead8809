"""The client of a load test: LLMeter's, for OpenAI's API."""

import ipaddress
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import openai
from llmeter.endpoints.base import InvocationResponse
from llmeter.endpoints.openai import OpenAICompletionStreamEndpoint

from config.errors import EnvironmentFault

CONNECT_SECONDS = 5.0
KEEP_SECONDS = 2.0
"""An idle connection is not reused after this many seconds: servers close theirs after 5 or more, and a request on its
way is then lost.
"""
PROBE_TOKENS = 4


class ChatEndpoint(OpenAICompletionStreamEndpoint):
    """A client that threads share, each of which sends one request at a time."""

    def __init__(self, url: str, model: str, key: str | None, timeout_seconds: float) -> None:
        """`url` ends in /v1 or the API's equivalent."""
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_SECONDS)
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        super().__init__(
            model, "chat", key or "none", base_url=url, max_retries=0,
            http_client=httpx.Client(timeout=timeout, limits=limits, trust_env=False),
        )  # fmt: skip
        self._stopped = threading.Event()
        self._payloads: Iterator[Mapping[str, Any]] | None = None
        self._arrivals: Iterator[float] | None = None
        self._lock = threading.Lock()

    def send_in_turn(self, payloads: Sequence[Mapping[str, Any]], arrivals: Sequence[float] | None = None) -> None:
        """Send these payloads in order, from whichever client is free: LLMeter gives all clients the same ones in the
        same order. With `arrivals` each waits until its time of `time.perf_counter`.
        """
        self._payloads = cycle(payloads)
        self._arrivals = None if arrivals is None else iter(arrivals)

    def stop(self) -> None:
        """Fail requests that were not sent yet, and end running ones."""
        self._stopped.set()
        self._client.close()

    def prepare_payload(self, payload: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            content = payload if self._payloads is None else next(self._payloads)
            arrival = 0.0 if self._arrivals is None else next(self._arrivals)
        self._stopped.wait(max(0.0, arrival - time.perf_counter()))
        prepared: dict[str, Any] = super().prepare_payload(content)
        return prepared

    def served_model(self, wanted: str | None) -> "ServedModel":
        """The model to request from now on: the one named, else the only one that the endpoint lists.

        Raises EnvironmentFault with one line for an endpoint that is dead or is not an OpenAI API.
        """
        try:
            listed = self._client.models.list().data
            settings = {model.id: (model.model_extra or {}).get("serving", {}) for model in listed}
        except (openai.APIError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"{self.url}/models: {_reason(error)}") from None
        if wanted is not None and wanted not in settings:
            raise EnvironmentFault(f"--model {wanted} is not served at {self.url}: {', '.join(settings)}.")
        if wanted is None and len(settings) != 1:
            raise EnvironmentFault(
                f"{self.url} serves {len(settings)} models: {', '.join(list(settings)[:5])}. Choose one with --model."
            )
        self.model_id = wanted or next(iter(settings))
        return ServedModel(self.model_id, settings[self.model_id])

    def reply_seconds(self, payload: Mapping[str, Any]) -> float:
        """Estimated seconds of a reply of the payload's length on an idle server, from a shorter one.

        Raises EnvironmentFault with one line for an endpoint that does not stream replies.
        """
        few = min(PROBE_TOKENS, payload["max_tokens"])
        for _ in range(2):  # the first one of a server may wait for what is set up only then
            response, began = InvocationResponse(response_text=None), time.perf_counter()
            body = self.prepare_payload({**payload, "max_tokens": few})
            try:
                self.process_raw_response(self._client.chat.completions.create(**body), began, response)
            except (openai.APIError, httpx.HTTPError, TypeError, AttributeError) as error:
                raise EnvironmentFault(f"{self.url}/chat/completions: {_reason(error)}") from None
        seconds, tokens = time.perf_counter() - began, response.num_tokens_output or few
        if not response.num_tokens_output and response.response_text is None:
            raise EnvironmentFault(f"{self.url}/chat/completions does not stream a reply.")
        ttft, last = response.time_to_first_token or seconds, response.time_to_last_token or seconds
        return ttft + (last - ttft) / max(1, tokens - 1) * payload["max_tokens"]


class ServedModel(NamedTuple):
    """A model of an endpoint."""

    name: str
    settings: Mapping[str, Any]
    """How our own server serves it: engine, weights, slots, threads; {} for other servers."""


def _reason(error: Exception) -> str:
    """Why an endpoint is of no use, and what to do about it."""
    if isinstance(error, openai.APIStatusError):
        if error.status_code in (401, 403):
            return f"it refuses the key (HTTP {error.status_code}). Set RLHF_SERVE_KEY to the endpoint's key."
        message = error.body.get("message") if isinstance(error.body, dict) else None
        detail = f": {str(message)[:150].rstrip('.')}" if message else ""
        return f"it answers with HTTP {error.status_code}{detail}. Is it the API, up to /v1?"
    if isinstance(error, openai.APIConnectionError | httpx.HTTPError):
        reason = str(error.__cause__ or error) or type(error).__name__
        return f"it does not answer ({reason}). Start it with rlhf serve, or check the address."
    return "it is not an OpenAI-compatible API. Give the address up to /v1."


def api_url(url: str) -> str:
    """Base address of the API: /v1 is appended to a bare host. Raises EnvironmentFault."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable:
        raise EnvironmentFault(f"{url} is not the address of an API. Give one like http://127.0.0.1:8000/v1.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def is_loopback(url: str) -> bool:
    """Whether an address belongs to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
