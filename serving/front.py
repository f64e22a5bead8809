"""The front: what stands between clients and an engine that speaks OpenAI's HTTP API. It checks the key, the limits
and the queue, and counts tokens; bodies and answers pass through as they are.
"""

import asyncio
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from serving.account import Account, Tokens
from serving.engines import Engine, EngineGone
from serving.feedback import FEEDBACK_PATH, Feedback, Heard, parsed
from serving.metrics import Metrics
from serving.refused import Refused, json_object
from serving.sides import CHAMPION, Sides

MAX_BODY_BYTES = 4 * 2**20
RETRY_SECONDS = 1
CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
END = b"\n\n"
DONE = b"data: [DONE]" + END
SERVER_ERROR = "server_error"
PAGE = Path(__file__).with_name("page.html")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The application, and the state its requests share."""

    feedback: Feedback | None = None
    """Keeps replies and what is said of them; None keeps nothing."""
    has_page = False
    """Whether a page for trying the model is at `/`."""

    def __init__(self, sides: Sides, key: str, hosts: frozenset[str], most_running: int, account: Account) -> None:
        """`hosts` are accepted Host headers; more than `most_running` requests are refused with 429."""
        self._sides, self._key, self._hosts, self._most = sides, key, hosts, most_running
        self._running = 0
        self.account = account
        self.metrics = Metrics()
        self.metrics.registry.register(account)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self.page),
                web.get("/health", self.health),
                web.get("/metrics", self.show_metrics),
                web.get(MODELS, self.models),
                web.post(CHAT, self.answer),
                web.post(COMPLETIONS, self.answer),
                web.post(FEEDBACK_PATH, self.take_feedback),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a foreign Host or Origin and a wrong key; report mistakes in OpenAI's format."""
        if request.path == "/health":
            return await handler(request)
        try:
            self._check(request, needs_key=request.path != "/")  # the page asks for it
            response = await handler(request)
        except Refused as error:
            response = _refusal(error.status, str(error), error.field)
        except EngineGone:
            response = _refusal(503, "the model is starting again; try once more.", "")
        except web.HTTPRequestEntityTooLarge:
            response = _refusal(413, f"the request is over {MAX_BODY_BYTES // 2**20} MiB.", "")
        except web.HTTPException as error:
            response = _refusal(error.status, f"{request.method} {request.path}: {error}.", "")
        if response.status in (429, 503) and not response.prepared:
            response.headers["Retry-After"] = str(RETRY_SECONDS)
        path = request.path if request.path in (CHAT, COMPLETIONS, MODELS, FEEDBACK_PATH) else "other"
        self.metrics.requests.labels(path, response.status).inc()
        return response

    def _check(self, request: web.Request, needs_key: bool) -> None:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if host not in self._hosts:
            raise Refused("host", f"Host {host!r} is not served here.", 403)
        if origin is not None and origin.partition("://")[2] not in self._hosts:
            raise Refused("origin", f"Origin {origin!r} may not use this server.", 403)
        if not needs_key:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(
            token.encode(errors="replace"), self._key.encode()
        ):
            raise Refused("authorization", "the key is missing or wrong: .rlhf/serve.key.", 401)

    # ------------------------------------------------------------ without an engine

    async def health(self, _: web.Request) -> web.Response:
        engine = self._sides.served.engine
        is_up = engine is not None and engine.is_alive
        return web.json_response({"status": "ok" if is_up else "starting"}, status=200 if is_up else 503)

    async def page(self, _: web.Request) -> web.Response:
        """One file, with nothing from elsewhere."""
        if not self.has_page:
            raise Refused("", "there is no page here: start the server with --page.", 404)
        nonce = secrets.token_urlsafe(16)
        is_single = any(engine.export.single_prompts for engine in self._sides.engines())
        settings = json.dumps({"rates": self.feedback is not None, "remembers": not is_single})
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return web.Response(
            text=PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).replace("{/* SETTINGS */}", settings),
            content_type="text/html",
            headers={
                "Content-Security-Policy": policy,
                "X-Frame-Options": "DENY",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
                "Referrer-Policy": "no-referrer",
            },
        )

    async def show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), content_type="text/plain")

    async def models(self, _: web.Request) -> web.Response:
        models = [
            {"id": engine.name, "object": "model", "owned_by": "rlhf-ledger", "serving": engine.settings._asdict()}
            for engine in self._sides.engines()
        ]
        return web.json_response({"object": "list", "data": models})

    async def take_feedback(self, request: web.Request) -> web.Response:
        """Store a rating or a comparison, and answer once it is on disk."""
        if self.feedback is None:
            raise Refused("", "no replies are kept here: start the server with --keep-replies DAYS.", 404)
        await self.feedback.say(parsed(await request.read()))
        return web.json_response({"object": "feedback", "kept": True})

    # ------------------------------------------------------------ replies

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on to the engine, and its answer back."""
        raw = await request.read()
        body = json_object(raw)
        engine = self._sides.engine_of(body)
        if engine is None:
            names = ", ".join(engine.name for engine in self._sides.engines())
            raise Refused("model", f"model={body['model']!r} is not served here; {names} is, or {CHAMPION}.", 404)
        if request.path == CHAT:
            _refuse_control_tokens(engine, body)
        if self._running >= self._most:
            raise Refused("", f"{self._most} requests are running; try again in a second.", 429)
        if self._sides.compares and body.get("n") == 2 and request.path == CHAT:
            return await self._one_of_each(body)
        hides_usage = _leaves_out_usage(body)
        if hides_usage:
            options = body.get("stream_options") or {}
            body["stream_options"] = {**options, "include_usage": True}
        if hides_usage or body.get("model") == CHAMPION:
            raw = json.dumps({**body, "model": engine.name}).encode()
        with self._counted(engine):
            try:
                return await self._passed(request, raw, body, engine, hides_usage)
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineGone from error

    async def _one_of_each(self, body: dict[str, Any]) -> web.Response:
        """A reply of each model, in an order that says nothing; every choice has the id under which it is rated."""
        if body.get("stream"):
            raise Refused("stream", "two replies side by side are not streamed; leave stream out.")
        engines = self._sides.engines()
        if len(engines) < 2:
            raise EngineGone
        answers = await asyncio.gather(*(self._whole(engine, body) for engine in engines))
        if failed := next((answer for answer in answers if "error" in answer), None):
            return web.json_response(failed, status=400)
        random.shuffle(answers)
        choices = [
            {**answer["choices"][0], "index": index, "id": answer["id"]} for index, answer in enumerate(answers)
        ]
        usage = {
            name: sum(answer["usage"][name] for answer in answers)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        return web.json_response({**answers[0], "model": CHAMPION, "choices": choices, "usage": usage})

    async def _whole(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        """An engine's own answer to a request for one reply, or its error."""
        raw = json.dumps({**body, "n": 1, "model": engine.name}).encode()
        with self._counted(engine):
            try:
                async with engine.post(CHAT, raw) as answer:
                    content: dict[str, Any] = await answer.json(content_type=None)
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineGone from error
        if answer.status == 200:
            await self._answered(engine, body, Tokens().with_those_of(content), Heard.of(content))
        return content

    async def _answered(self, engine: Engine, body: dict[str, Any], tokens: Tokens, heard: Heard) -> None:
        """Count a reply, and keep it if replies are kept."""
        self.metrics.prompt_tokens.labels(engine.name).inc(tokens.prompt)
        self.metrics.reply_tokens.labels(engine.name).inc(tokens.reply)
        self.account.answered(engine.name, tokens)
        if self.feedback is not None:
            await self.feedback.keep(engine.name, body, heard, tokens)

    @contextmanager
    def _counted(self, engine: Engine) -> Iterator[None]:
        """Enter around the work on a reply, with no await since the engine was chosen."""
        self._running += 1
        self.metrics.running.set(self._running)
        try:
            with engine.in_use(), self.account.at_work(engine.name):
                yield
        finally:
            self._running -= 1
            self.metrics.running.set(self._running)

    async def _passed(
        self, request: web.Request, raw: bytes, body: dict[str, Any], engine: Engine, hides_usage: bool
    ) -> web.StreamResponse:
        """The engine's answer; without its last chunk, of token counts, with `hides_usage`. A reply that is kept is on
        disk before its end is sent.
        """
        began, heard = time.monotonic(), Heard()
        async with engine.post(request.path, raw) as answer:
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            if answer.content_type != "text/event-stream":
                whole = await answer.read()
                if answer.status == 200:
                    content = json.loads(whole)
                    await self._answered(engine, body, Tokens().with_those_of(content), Heard.of(content))
                return web.Response(body=whole, status=answer.status, headers=kind)
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            first, tokens, event = 0.0, Tokens(), b""
            try:
                while event != DONE:
                    if not (event := await answer.content.readuntil(END)):
                        raise ConnectionError("the answer is incomplete")
                    first = first or time.monotonic()
                    content = _counts(event)
                    tokens = tokens.with_those_of(content)
                    if event == DONE:
                        last = time.monotonic()
                        await self._answered(engine, body, tokens.timed(first - began, last - first), heard)
                    elif self.feedback is not None:
                        heard.add(content or json.loads(event.removeprefix(b"data:")))
                    if not (hides_usage and content and not content.get("choices")):
                        await response.write(event)
            except (aiohttp.ClientError, ConnectionError) as error:
                fault = {"message": f"the engine ended ({error}); try again.", "type": SERVER_ERROR}
                await response.write(b"data: " + json.dumps({"error": fault}).encode() + END)
                return response
        self.metrics.ttft.labels(engine.name).observe(first - began)
        if tokens.reply > 1:
            self.metrics.tpot.labels(engine.name).observe((last - first) / (tokens.reply - 1))
        return response


def _refuse_control_tokens(engine: Engine, body: dict[str, Any]) -> None:
    """Engines read a control token that is spelt in a message as the token itself: a turn could be forged."""
    text = json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False)
    if match := engine.control_tokens.search(text):
        raise Refused("messages", f"{match[0]} is a control token of the model; write it in another way.")


def _leaves_out_usage(body: dict[str, Any]) -> bool:
    """Whether the client wants a streamed reply without its token counts, which the front needs."""
    options = body.get("stream_options") or {}
    is_streamed = body.get("stream") is True and isinstance(options, dict)
    return is_streamed and not options.get("include_usage")


def _counts(event: bytes) -> dict[str, Any]:
    """The content of an event with token counts or timings; {} of any other."""
    if b'"usage"' not in event and b'"timings"' not in event:
        return {}
    content: dict[str, Any] = json.loads(event.removeprefix(b"data:"))
    return content


def _refusal(status: int, message: str, field: str) -> web.Response:
    kind = SERVER_ERROR if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": field or None, "code": None}
    return web.json_response({"error": error}, status=status)
