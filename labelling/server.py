"""The labelling page and its three questions, on this machine's own address only.

GET  /                                   the page, one HTML file
GET  /api/next?annotator=NAME            progress, and the first pair that this annotator has not
     seen
GET  /api/back?annotator=NAME&from=KEY   the pair they voted on before that one
POST /api/vote                           {annotator, pair, choice}: left, right, tie or skip;
                                         answers as /api/next does
"""

import json
import secrets
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from config.errors import DataError, EnvironmentFault, UserError
from config.terminal_text import shown
from labelling.votes import Pair, Vote, annotator_name, append, current, read_pairs, read_votes, shown_left

LOOPBACK = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 10_000


class Session:
    """Pairs, the votes on them, and the file that keeps the votes. Safe to use from several threads."""

    def __init__(self, pairs_file: Path, votes_file: Path) -> None:
        """Raises DataError if a file has a line that is no pair or vote, or there is no pair."""
        self._pairs = {pair.key: pair for pair in read_pairs(pairs_file)}
        if not self._pairs:
            raise DataError(f"{pairs_file} has no pair to label. Draw some: rlhf label --new 50.")
        self._votes_file = votes_file
        self._lock = threading.Lock()
        self._votes = current(read_votes(votes_file))

    def next(self, annotator: str) -> dict[str, Any]:
        """Progress of an annotator, and the first pair without a vote of theirs; null when all are done."""
        with self._lock:
            votes = {
                key: vote for (name, key), vote in self._votes.items() if name == annotator and key in self._pairs
            }
        unvoted = next((pair for key, pair in self._pairs.items() if key not in votes), None)
        return self._state(annotator, votes, unvoted)

    def back(self, annotator: str, before: str) -> dict[str, Any]:
        """Like `next`, but with the pair voted on before the pair `before`, or the last one if that has no vote; the
        first pair stays first.
        """
        with self._lock:
            votes = {
                key: vote for (name, key), vote in self._votes.items() if name == annotator and key in self._pairs
            }
        order = list(votes)
        position = order.index(before) if before in votes else len(order)
        if not order:
            return self.next(annotator)
        return self._state(annotator, votes, self._pairs[order[max(0, position - 1)]])

    def vote(self, annotator: str, key: str, choice: str) -> None:
        """Keep a vote. Raises DataError for an unknown pair or choice, EnvironmentFault if it cannot be written."""
        pair = self._pairs.get(key)
        if pair is None:
            raise DataError(f"pair {shown(key)} is not one of the {len(self._pairs)} pairs. Load the page again.")
        on_the_left = shown_left(pair, annotator)
        vote_of = {"left": on_the_left, "right": 3 - on_the_left, "tie": 0, "skip": None}
        if choice not in vote_of:
            raise DataError(f"choice {shown(choice)} is not one of {', '.join(vote_of)}.")
        vote = Vote(pair, annotator, vote_of[choice], on_the_left)
        with self._lock:
            append(self._votes_file, [vote])
            self._votes.pop((annotator, key), None)
            self._votes[annotator, key] = vote

    def _state(self, annotator: str, votes: dict[str, Vote], pair: Pair | None) -> dict[str, Any]:
        skipped = sum(vote.vote is None for vote in votes.values())
        shown = None
        if pair is not None:
            number = shown_left(pair, annotator)
            replies = (pair.response1, pair.response2) if number == 1 else (pair.response2, pair.response1)
            shown = {
                "key": pair.key,
                "prompt": pair.prompt,
                "left": replies[0],
                "right": replies[1],
                "choice": _choice(votes.get(pair.key), number),
            }
        return {"total": len(self._pairs), "done": len(votes), "skipped": skipped, "pair": shown}


def _choice(vote: Vote | None, shown: int) -> str | None:
    """An earlier choice in the page's terms."""
    if vote is None:
        return None
    return {None: "skip", 0: "tie", shown: "left"}.get(vote.vote, "right")


def serve(session: Session, port: int = 0) -> ThreadingHTTPServer:
    """A server bound to a port of the loopback address, a free one for 0; call its `serve_forever`.

    Raises EnvironmentFault if the port is taken.
    """
    try:
        return _Server(port, session)
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(
            f"--port {port} cannot be used: {getattr(error, 'strerror', error)}. Take another, or 0 for a free one."
        ) from None


def url(server: ThreadingHTTPServer) -> str:
    return f"http://{LOOPBACK}:{server.server_port}/"


class _Server(ThreadingHTTPServer):
    """The request handler of one session."""

    def __init__(self, port: int, session: Session) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.session = session


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query, session = dict(urllib.parse.parse_qsl(url.query)), self.server.session
        match url.path if self._is_ours() else None:
            case None:
                self._refuse()
            case "/":
                self._page()
            case "/api/next":
                self._answer(lambda: session.next(annotator_name(query.get("annotator"))))
            case "/api/back":
                self._answer(lambda: session.back(annotator_name(query.get("annotator")), query.get("from", "")))
            case _:
                self._json(HTTPStatus.NOT_FOUND, {"error": f"{url.path[:100]} is not a page of this server."})

    def do_POST(self) -> None:
        self._answer(self._vote if self.path == "/api/vote" else None)

    def _vote(self) -> dict[str, Any]:
        # other sites' forms cannot send this type without a preflight request
        if self.headers.get_content_type() != "application/json":
            raise DataError("a vote is sent as application/json.")
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MAX_BODY_BYTES:
            raise DataError(f"a vote of {length} bytes: 1 to {MAX_BODY_BYTES} are allowed.")
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            raise DataError("the vote is not JSON.") from None
        if not isinstance(body, dict):
            raise DataError("the vote is not a JSON object.")
        annotator = annotator_name(body.get("annotator"))
        self.server.session.vote(annotator, str(body.get("pair")), str(body.get("choice")))
        return self.server.session.next(annotator)

    def _answer(self, work: Callable[[], dict[str, Any]] | None) -> None:
        """The result of `work`, or the user's mistake in one line."""
        if not self._is_ours():
            self._refuse()
        elif work is None:
            self._json(HTTPStatus.NOT_FOUND, {"error": f"{self.path[:100]} takes no votes."})
        else:
            try:
                self._json(HTTPStatus.OK, work())
            except EnvironmentFault as error:
                self._json(HTTPStatus.INSUFFICIENT_STORAGE, {"error": str(error)})
            except (UserError, ValueError) as error:
                self._json(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def _refuse(self) -> None:
        self._json(HTTPStatus.FORBIDDEN, {"error": "this address is not the one that the page was opened under."})

    def _is_ours(self) -> bool:
        """Whether the request names this server. Protects against other sites that resolve to this address or post to
        it.
        """
        hosts = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin.removeprefix("http://") in hosts)

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        content = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).encode()
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'"
        )
        self._send(
            HTTPStatus.OK,
            "text/html; charset=utf-8",
            content,
            {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"},
        )

    def _json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode(), {})

    def _send(self, status: HTTPStatus, kind: str, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        fields = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in {**fields, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows the address, not every request."""
