"""The client of a load test: streams chat completions and times their tokens."""

import ipaddress
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import cycle
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from llmeter.endpoints.base import Endpoint, InvocationResponse

from config.errors import EnvironmentFault
from serving.lines import lines

CONNECT_SECONDS = 5.0
KEEP_SECONDS = 2.0
"""An idle connection is not reused after this many seconds."""
PROBE_SECONDS = 30.0
"""Seconds after which a missing first token ends the load test."""
PROBE_TOKENS = 4


class ChatEndpoint(Endpoint[httpx.Response]):
    """A client of an OpenAI-compatible chat API, shared by threads that send one request at a time
    each.
    """

    def __init__(self, url: str, model: str, key: str | None, timeout_seconds: float) -> None:
        """`url` ends in /v1 or the API's equivalent."""
        super().__init__("chat", model, "openai-compatible")
        self.url = url
        self._client = client(url, key, timeout_seconds)
        self._stopped = threading.Event()
        self._payloads: Iterator[Mapping[str, Any]] | None = None
        self._arrivals: Iterator[float] | None = None
        self._lock = threading.Lock()

    def send_in_turn(
        self, payloads: Sequence[Mapping[str, Any]], arrivals: Sequence[float] | None = None
    ) -> None:
        """Send these payloads in order, from whichever client is free: LLMeter gives all clients
        the same ones in the same order. With `arrivals` each waits until its time of
        `time.perf_counter`.
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
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {**content, "model": self.model_id, **options}

    @Endpoint.llmeter_invoke
    def invoke(self, payload: dict[str, Any]) -> httpx.Response:
        if self._stopped.is_set():
            raise InterruptedError("the load test was stopped")
        return self.send(payload)

    def send(self, payload: Mapping[str, Any]) -> httpx.Response:
        """Open a streamed reply without reading it. Raises httpx.HTTPError."""
        request = self._client.build_request("POST", "/chat/completions", json=payload)
        return self._client.send(request, stream=True)

    def process_raw_response(
        self, raw_response: httpx.Response, start_t: float, response: InvocationResponse
    ) -> None:
        """Read a reply. Tokens are counted by the endpoint, else one per chunk.

        Raises ValueError for anything but a whole streamed reply.
        """
        with closing(raw_response):
            if fault := fault_of(raw_response):
                raise ValueError(fault)
            parts = 0
            for chunk in events(raw_response):
                now = time.perf_counter() - start_t
                if "error" in chunk:
                    raise ValueError(f"error in the stream: {str(chunk['error'])[:120]}")
                if any(_text(choice) for choice in chunk.get("choices") or ()):
                    parts += 1
                    response.time_to_first_token = response.time_to_first_token or now
                    response.time_to_last_token = now
                if usage := chunk.get("usage"):
                    response.num_tokens_input = int(usage["prompt_tokens"])
                    response.num_tokens_output = int(usage["completion_tokens"])
                if timings := chunk.get("timings"):  # llama.cpp's own, without the time in a queue
                    response.annotations["prefill_seconds"] = timings["prompt_ms"] / 1000
        response.response_text = ""
        response.num_tokens_output = response.num_tokens_output or parts
        response.num_tokens_input = response.num_tokens_input or 0
        if not parts:  # an empty reply: EOS came first
            response.time_to_first_token = response.time_to_last_token = (
                time.perf_counter() - start_t
            )

    def _parse_payload(self, payload: dict[str, Any]) -> str:
        return ""


def client(url: str, key: str | None, timeout_seconds: float) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # servers close idle connections (uvicorn after 5 s), and a request on its way is then lost
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_SECONDS
    )
    timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
    return httpx.Client(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False
    )


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """JSON objects of server-sent events. Raises ValueError for anything else."""
    for line in lines(response):
        text = line.removeprefix("data:").strip()
        if not line.startswith("data:") or text == "[DONE]":
            continue
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"an event is {text[:60]!r}, not an object")
        yield content


def fault_of(response: httpx.Response) -> str | None:
    """Why a response is not a stream of events, in a few words."""
    kind = response.headers.get("content-type", "no content type").partition(";")[0]
    if response.status_code == 200:
        return None if kind == "text/event-stream" else f"{kind} instead of an event stream"
    return f"HTTP {response.status_code}"


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""


def api_url(url: str) -> str:
    """Base address of the API: /v1 is appended to a bare host. Raises EnvironmentFault."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable:
        raise EnvironmentFault(
            f"{url} is not the address of an API. Give one like http://127.0.0.1:8000/v1."
        )
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(url: str) -> bool:
    """Whether an address belongs to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServedModel(NamedTuple):
    """A model of an endpoint."""

    name: str
    settings: Mapping[str, Any]
    """How our own server serves it: engine, weights, slots, threads; {} for other servers."""


def served_model(url: str, key: str | None, wanted: str | None) -> ServedModel:
    """The model to request: the one named, else the only one that the endpoint lists.

    Raises EnvironmentFault with one line for an endpoint that is dead or is not an OpenAI API.
    """
    with client(url, key, PROBE_SECONDS) as asking:
        try:
            response = asking.get("/models")
        except httpx.HTTPError as error:
            raise _dead(url, error) from None
    if response.status_code in (401, 403):
        raise _key_refused(url, response.status_code)
    try:
        found = {str(each["id"]): each.get("serving") or {} for each in response.json()["data"]}
    except (ValueError, LookupError, TypeError, AttributeError):
        kind = response.headers.get("content-type", "no content type").partition(";")[0]
        raise EnvironmentFault(
            f"{url}/models answers with HTTP {response.status_code} and {kind}, not with a list of "
            "models: it is not an OpenAI-compatible API. Give the address up to /v1."
        ) from None
    if wanted is not None and wanted not in found:
        raise EnvironmentFault(f"--model {wanted} is not served at {url}: {', '.join(found)}.")
    if wanted is None and len(found) != 1:
        raise EnvironmentFault(
            f"{url} serves {len(found)} models: {', '.join(list(found)[:5])}. Choose one with "
            "--model."
        )
    name = wanted or next(iter(found))
    return ServedModel(name, found[name])


def reply_seconds(url: str, model: str, key: str | None, payload: Mapping[str, Any]) -> float:
    """Estimated seconds of one reply of the payload's length on an idle server, from a shorter
    reply.

    Raises EnvironmentFault with one line for an endpoint that does not stream replies.
    """
    first = {**payload, "max_tokens": min(PROBE_TOKENS, payload["max_tokens"])}
    endpoint = ChatEndpoint(url, model, key, PROBE_SECONDS)
    try:
        body = endpoint.prepare_payload(first)
        began = time.perf_counter()
        response = endpoint.send(body)
        if response.status_code in (401, 403):
            raise _key_refused(url, response.status_code)
        if response.status_code >= 400:
            detail = _detail(response)
            raise EnvironmentFault(
                f"{url}/chat/completions answers with HTTP {response.status_code}{detail}."
            )
        found = InvocationResponse(response_text=None)
        endpoint.process_raw_response(response, began, found)
    except httpx.HTTPError as error:
        raise _dead(url, error) from None
    except ValueError as error:
        raise EnvironmentFault(f"{url}/chat/completions answers with {error}.") from None
    finally:
        endpoint.stop()
    ttft, tokens = found.time_to_first_token or 0.0, found.num_tokens_output or 1
    rest = ((found.time_to_last_token or ttft) - ttft) / max(1, tokens - 1)
    return ttft + rest * payload["max_tokens"]


def _detail(response: httpx.Response) -> str:
    """The message of an error in OpenAI's format, if it is one."""
    try:
        response.read()
        return f": {str(response.json()['error']['message'])[:150].rstrip('.')}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return ""


def _key_refused(url: str, status: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"{url} refuses the key (HTTP {status}). Set RLHF_SERVE_KEY to the endpoint's key."
    )


def _dead(url: str, error: httpx.HTTPError) -> EnvironmentFault:
    reason = str(error) or type(error).__name__
    return EnvironmentFault(
        f"{url} does not answer ({reason}). Start it with rlhf serve, or check the address."
    )
