"""The front: OpenAI's HTTP API over an engine. It owns the key, the limits, the queue and the
prompts.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from config.workspace.served import RECORD_SECONDS
from serving.account import Account
from serving.engines import Engine, EngineGone, Part
from serving.limits import MAX_BODY_BYTES, BadRequest, Sampling, messages, sampling
from serving.metrics import Metrics
from serving.prompts import Message, Prompt
from serving.swap import Swap

RETRY_SECONDS = 1
LOOK_SECONDS = 0.5
"""Seconds between checks whether the client of a running reply is still connected."""
PATHS = ("/v1/models", "/v1/chat/completions", "/v1/completions")


class Front:
    """The application, and the state its requests share."""

    def __init__(
        self,
        swap: Swap,
        key: str,
        hosts: frozenset[str],
        most_at_work: int,
        account: Account,
    ) -> None:
        """`hosts` are accepted Host headers; more than `most_at_work` requests are refused with
        429.
        """
        self._swap, self._key, self._hosts, self._most = swap, key, hosts, most_at_work
        self._at_work = 0
        self._account = account
        self.metrics = Metrics()
        self.metrics.registry.register(account)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self._guarded(self.show_metrics)),
                Route("/v1/models", self._guarded(self.models)),
                Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
                Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        keepers = {asyncio.create_task(self._swap.keep()), asyncio.create_task(self._record())}
        yield
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
        await self._swap.end()

    async def _record(self) -> None:
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            self._account.record()

    def _guarded(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Refuse a foreign Host or Origin and a wrong key; report mistakes in OpenAI's format."""

        async def handled(request: Request) -> Response:
            try:
                self._check(request)
                response: Response = await handle(request)
            except BadRequest as error:
                response = _refusal(error.status, str(error), error.field)
            except EngineGone:
                response = _refusal(503, "the model is starting again; try once more.", "")
            except ClientDisconnect:
                response = Response(status_code=499)
            if response.status_code in (429, 503):
                response.headers["Retry-After"] = str(RETRY_SECONDS)
            path = request.url.path if request.url.path in PATHS else "other"
            self.metrics.requests.labels(path, response.status_code).inc()
            return response

        return handled

    def _check(self, request: Request) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            raise BadRequest("host", f"Host {host!r} is not served here.", 403)
        if origin is not None and origin.partition("://")[2] not in self._hosts:
            raise BadRequest("origin", f"Origin {origin!r} may not use this server.", 403)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(
            given.encode(), self._key.encode()
        ):
            raise BadRequest("authorization", "the key is missing or wrong: .rlhf/serve.key.", 401)

    # ------------------------------------------------------------ without an engine

    async def health(self, _: Request) -> Response:
        engine = self._swap.engine
        is_up = engine is not None and engine.is_alive
        return JSONResponse({"status": "ok" if is_up else "starting"}, 200 if is_up else 503)

    async def show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def models(self, _: Request) -> Response:
        engine = self._engine()
        one = {
            "id": engine.name,
            "object": "model",
            "owned_by": "rlhf-ledger",
            "serving": engine.settings._asdict(),
        }
        return JSONResponse({"object": "list", "data": [one]})

    # ------------------------------------------------------------ replies

    async def chat(self, request: Request) -> Response:
        body = await _body(request)
        engine = self._chosen(body)
        return await self._reply(request, body, engine, messages(body), is_chat=True)

    async def completions(self, request: Request) -> Response:
        body = await _body(request)
        engine = self._chosen(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequest("prompt", f"prompt={prompt!r:.80} must be one text.")
        chat = [{"role": "user", "content": prompt}]
        return await self._reply(request, body, engine, chat, is_chat=False)

    def _engine(self) -> Engine:
        engine = self._swap.engine
        if engine is None or not engine.is_alive:
            raise EngineGone
        return engine

    def _chosen(self, body: dict[str, Any]) -> Engine:
        engine = self._engine()
        name = body.get("model", engine.name)
        if name not in (engine.name, "champion"):
            raise BadRequest(
                "model", f"model={name!r} is not served here; {engine.name} is, or champion.", 404
            )
        return engine

    async def _reply(
        self,
        request: Request,
        body: dict[str, Any],
        engine: Engine,
        chat: list[Message],
        is_chat: bool,
    ) -> Response:
        with engine.in_use():
            prompt = await asyncio.to_thread(engine.prompts.of_chat, chat)
            settings = sampling(body, len(prompt.ids), engine.prompts.context_length)
            if self._at_work >= self._most:
                raise BadRequest(
                    "", f"{self._most} requests are running; try again in a second.", 429
                )
            shape = _Shape(engine.name, is_chat, len(prompt.ids))
            parts = self._parts(engine, prompt, settings)
            if settings.stream:
                events = self._events(parts, shape, settings.include_usage)
                return _Streamed(events, lambda: self._counted(engine))
            with self._counted(engine):
                return await self._whole(request, parts, shape)

    @contextmanager
    def _counted(self, engine: Engine) -> Iterator[None]:
        """Enter around the work on a reply, with no await since the queue was checked."""
        self._at_work += 1
        self.metrics.waiting.set(self._at_work)
        try:
            with engine.in_use(), self._account.at_work(engine.name):
                yield
        finally:
            self._at_work -= 1
            self.metrics.waiting.set(self._at_work)

    async def _parts(
        self, engine: Engine, prompt: Prompt, settings: Sampling
    ) -> AsyncIterator[Part]:
        began, first, tokens = time.monotonic(), True, 0
        async for part in engine.generate(prompt, settings):
            if first:
                self.metrics.first_part_seconds.observe(time.monotonic() - began)
                self.metrics.prompt_tokens.inc(len(prompt.ids))
                first = False
            self.metrics.reply_tokens.inc(max(0, part.tokens - tokens))
            tokens = max(tokens, part.tokens)
            if part.finish_reason is not None:
                self._account.answered(engine.name, len(prompt.ids), part)
            yield part

    async def _whole(
        self, request: Request, parts: AsyncIterator[Part], shape: "_Shape"
    ) -> Response:
        async def only_part() -> Part:
            return [part async for part in parts][-1]

        work = asyncio.create_task(only_part())
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_SECONDS)
            if not work.done() and await request.is_disconnected():
                work.cancel()
                raise ClientDisconnect
        part = work.result()
        return JSONResponse(shape.complete(part.text.strip(), part.tokens, part.finish_reason))

    async def _events(
        self, parts: AsyncIterator[Part], shape: "_Shape", include_usage: bool
    ) -> AsyncIterator[str]:
        began, tokens, part = False, 0, None
        try:
            async for part in parts:
                tokens = max(tokens, part.tokens)
                text = part.text if began else part.text.lstrip()
                began = began or bool(text)
                if text or part.finish_reason:
                    yield f"data: {json.dumps(shape.part(text, part.finish_reason))}\n\n"
            if include_usage and part is not None:
                yield f"data: {json.dumps(shape.usage_chunk(tokens, part))}\n\n"
            yield "data: [DONE]\n\n"
        except EngineGone as error:
            content = {"error": {"message": f"{error}; try again.", "type": "server_error"}}
            yield f"data: {json.dumps(content)}\n\n"


class _Streamed(StreamingResponse):
    """Server-sent events within a context that lasts from before the first to after the last, or
    until the client disconnects.
    """

    def __init__(
        self, events: AsyncIterator[str], context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context():
            await super().__call__(scope, receive, send)


class _Shape:
    """OpenAI's answer objects."""

    def __init__(self, model: str, is_chat: bool, prompt_tokens: int) -> None:
        self._is_chat, self._prompt_tokens = is_chat, prompt_tokens
        self._common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def complete(self, text: str, tokens: int, reason: str | None) -> dict[str, Any]:
        return {**self._answer("chat.completion", "message", text, reason), **self._usage(tokens)}

    def part(self, text: str, reason: str | None) -> dict[str, Any]:
        return self._answer("chat.completion.chunk", "delta", text, reason)

    def usage_chunk(self, tokens: int, last: Part) -> dict[str, Any]:
        """Last chunk: token counts, and seconds if the engine measures them, named as in
        llama.cpp's server.
        """
        timings = {}
        if last.prefill_seconds is not None and last.decode_seconds is not None:
            timings = {
                "timings": {
                    "prompt_ms": 1000 * last.prefill_seconds,
                    "predicted_ms": 1000 * last.decode_seconds,
                }
            }
        return {**self.part("", None), "choices": [], **self._usage(tokens), **timings}

    def _usage(self, tokens: int) -> dict[str, Any]:
        return {
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": self._prompt_tokens + tokens,
            }
        }

    def _answer(self, kind: str, name: str, text: str, reason: str | None) -> dict[str, Any]:
        """`kind` and `name` are those of a chat; completions have their own."""
        content = (
            {name: {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        )
        return {
            **self._common,
            "object": kind if self._is_chat else "text_completion",
            "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **content}],
        }


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises BadRequest."""
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise BadRequest("", f"the request is over {MAX_BODY_BYTES // 2**20} MiB.", 413)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest("", f"the request is not JSON ({error}).") from None
    if not isinstance(body, dict):
        raise BadRequest("", f"the request is a {type(body).__name__}; an object is needed.")
    return body


def _refusal(status: int, message: str, field: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": field or None, "code": None}
    return JSONResponse({"error": error}, status)
