"""The labelling page over HTTP: every annotator resumes where they were, and nothing foreign gets in."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.errors import DataError, EnvironmentFault
from labelling.server import LOOPBACK, Session, serve
from labelling.votes import read_pairs, read_votes, shown_left

PAIRS = 4


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    rows = [{"prompt": f"p{i}", "response1": f"<b>{i}</b>", "response2": f"b{i}", "seed": 1} for i in range(PAIRS)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl", tmp_path / "votes.jsonl"


@pytest.fixture
def port(files: tuple[Path, Path]) -> Iterator[int]:
    with serve(Session(*files)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    content = body if isinstance(body, str) or body is None else json.dumps(body)
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, content, sent)
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read())
    connection.close()
    return result


def vote(port: int, annotator: str, choice: str) -> dict[str, Any]:
    """Vote on the pair that comes next."""
    pair = ask(port, f"/api/next?annotator={annotator}")[1]["pair"]
    status, state = ask(port, "/api/vote", {"annotator": annotator, "pair": pair["key"], "choice": choice})
    assert status == 200, state
    return state


def test_votes_are_of_the_response_not_of_the_side(port: int, files: tuple[Path, Path]) -> None:
    states = [vote(port, "ada", choice) for choice in ("left", "right", "tie", "skip")]
    assert [(state["done"], state["skipped"]) for state in states] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert states[-1]["pair"] is None
    left_numbers = [shown_left(pair, "ada") for pair in read_pairs(files[0])]
    assert [row.vote for row in read_votes(files[1])] == [left_numbers[0], 3 - left_numbers[1], 0, None]
    assert [row.left for row in read_votes(files[1])] == left_numbers


def test_what_is_shown_on_the_left_is_what_left_means(port: int, files: tuple[Path, Path]) -> None:
    for name in ("ada", "bob", "cyd"):
        pair = ask(port, f"/api/next?annotator={name}")[1]["pair"]
        vote(port, name, "left")
        votes = read_votes(files[1])[-1]
        assert pair["left"] == (votes.pair.response1 if votes.vote == 1 else votes.pair.response2)
        assert pair["right"] == (votes.pair.response2 if votes.vote == 1 else votes.pair.response1)


def test_annotators_have_their_own_progress_and_resume_after_a_restart(port: int, files: tuple[Path, Path]) -> None:
    vote(port, "ada", "left")
    vote(port, "ada", "skip")
    vote(port, "bob", "tie")
    again = Session(*files)
    assert [again.next(name)["done"] for name in ("ada", "bob", "cyd")] == [2, 1, 0]
    assert again.next("ada") == ask(port, "/api/next?annotator=ada")[1]


def test_going_back_shows_the_earlier_choice_and_a_new_vote_replaces_it(port: int, files: tuple[Path, Path]) -> None:
    vote(port, "ada", "left")
    vote(port, "ada", "tie")
    last = ask(port, "/api/back?annotator=ada&from=")[1]["pair"]
    first = ask(port, f"/api/back?annotator=ada&from={last['key']}")[1]["pair"]
    assert (last["choice"], first["choice"]) == ("tie", "left")
    assert ask(port, f"/api/back?annotator=ada&from={first['key']}")[1]["pair"] == first
    state = ask(port, "/api/vote", {"annotator": "ada", "pair": first["key"], "choice": "right"})[1]
    assert (state["done"], len(read_votes(files[1]))) == (2, 3)
    assert Session(*files).back("ada", "")["pair"]["choice"] == "right"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"annotator": "ada", "pair": "nowhere", "choice": "left"}, "nowhere"),
        ({"annotator": "ada", "choice": "left"}, "None"),
        ({"annotator": "", "pair": "x", "choice": "left"}, "annotator"),
        ([1], "object"),
        ("{", "not JSON"),
        ("x" * 20_000, "20000 bytes"),
    ],
)
def test_a_vote_that_is_none_is_refused_and_not_kept(
    port: int, files: tuple[Path, Path], body: Any, named: str
) -> None:
    status, answer = ask(port, "/api/vote", body)
    assert (status, named in answer["error"]) == (400, True)
    assert not files[1].exists()


def test_an_unknown_choice_is_refused(port: int, files: tuple[Path, Path]) -> None:
    key = ask(port, "/api/next?annotator=ada")[1]["pair"]["key"]
    assert ask(port, "/api/vote", {"annotator": "ada", "pair": key, "choice": "up"})[0] == 400
    assert not files[1].exists()


def test_other_sites_can_neither_read_nor_vote(port: int, files: tuple[Path, Path]) -> None:
    body = {"annotator": "ada", "pair": ask(port, "/api/next?annotator=ada")[1]["pair"]["key"], "choice": "left"}
    for path in ("/", "/nothing", "/api/next?annotator=ada"):
        assert ask(port, path, Host=f"example.org:{port}")[0] == 403
    assert ask(port, "/api/vote", body, Origin="http://example.org")[0] == 403
    assert ask(port, "/api/vote", body, Content_Type="text/plain")[0] == 400
    assert not files[1].exists()
    assert ask(port, "/api/vote", body, Origin=f"http://localhost:{port}")[0] == 200


def test_a_vote_that_cannot_be_written_is_an_error_on_the_page(port: int, files: tuple[Path, Path]) -> None:
    files[1].mkdir()
    key = ask(port, "/api/next?annotator=ada")[1]["pair"]["key"]
    status, answer = ask(port, "/api/vote", {"annotator": "ada", "pair": key, "choice": "left"})
    assert (status, "Is a directory" in answer["error"]) == (507, True)
    assert ask(port, "/api/next?annotator=ada")[1]["done"] == 0


def test_the_page_is_one_file_without_outside_resources(port: int) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    connection.request("GET", "/?annotator=ada")
    answer = connection.getresponse()
    page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    connection.close()
    assert "default-src 'none'" in policy
    nonces = set(re.findall(r'nonce="([^"]+)"', page))
    assert len(nonces) == 1
    assert policy.count(f"'nonce-{nonces.pop()}'") == 2
    assert re.findall(r"(?:src|href)=\"(?!data:,)|https?://|innerHTML|insertAdjacentHTML|document\.write", page) == []


def test_a_taken_port_and_no_pairs_are_one_line(port: int, tmp_path: Path) -> None:
    session = Session(tmp_path / "pairs.jsonl", tmp_path / "votes.jsonl")
    for wrong in (port, 99_999):
        with pytest.raises(EnvironmentFault, match=f"--port {wrong}"):
            serve(session, wrong)
    with pytest.raises(DataError, match="rlhf label --new"):
        Session(tmp_path / "none.jsonl", tmp_path / "votes.jsonl")
