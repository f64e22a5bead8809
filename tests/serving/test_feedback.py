"""What people say of served replies: the store, and the front that keeps it."""

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from config.errors import EnvironmentFault
from config.workspace.feedback import (
    DOWN,
    FEEDBACK,
    SNAPSHOT,
    UP,
    FeedbackStore,
    KeptReply,
    UnknownReply,
    renew_snapshot,
)
from config.workspace.served import served_of
from serving.feedback import MAX_FEEDBACK_BYTES, parsed
from serving.refused import Refused
from serving.sides import conversation, is_within
from tests.serving.fronts import Served, made_export
from tests.training.support.tiny import policy


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    with closing(FeedbackStore(tmp_path)) as opened:
        for name, user, prompt in (("a", "ann", "p"), ("b", "bob", "p"), ("c", "ann", "q")):
            opened.keep(KeptReply(name, "run-1", user, [{"role": "user", "content": prompt}], f"r {name}", 3, 2))
        yield opened


# ---------------------------------------------------------------- the store


def test_the_last_word_of_a_user_on_a_reply_counts(store: FeedbackStore) -> None:
    for user, reply, rating in (("ann", "a", UP), ("bob", "a", UP), ("ann", "a", DOWN), ("ann", "c", UP)):
        assert store.rate(reply, user, rating, "") == "run-1"
    assert list(store.rows()) == [
        {"prompt": "p", "completion": "r a", "label": True},
        {"prompt": "p", "completion": "r a", "label": False},
        {"prompt": "q", "completion": "r c", "label": True},
    ]


def test_the_last_word_on_two_replies_counts_in_either_order(store: FeedbackStore) -> None:
    store.prefer("a", "b", "ann", "")
    store.prefer("b", "a", "ann", "")
    store.rate("a", "ann", UP, "")
    assert list(store.rows()) == [
        {"prompt": "p", "chosen": "r b", "rejected": "r a"},
        {"prompt": "p", "completion": "r a", "label": True},
    ]
    assert store.prefer("a", "c", "ann", "") is None
    with pytest.raises(UnknownReply, match="z"):
        store.prefer("a", "z", "ann", "")


def test_several_turns_stay_a_conversation(store: FeedbackStore) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    store.keep(KeptReply("d", "run-1", "", turns, "r d", 3, 2))
    store.rate("d", "", UP, "")
    assert next(store.rows())["prompt"] == turns


def test_replies_expire_unless_somebody_spoke_of_them(store: FeedbackStore) -> None:
    store.rate("a", "ann", UP, "")
    assert store.expire(1.0) == 0
    assert store.expire(0.0) == 2
    with pytest.raises(UnknownReply):
        store.rate("c", "ann", UP, "")
    assert len(list(store.rows())) == 1


def test_what_is_forgotten_is_in_no_file(store: FeedbackStore, tmp_path: Path) -> None:
    began = time.time()
    for reply, user in (("a", "bob"), ("b", "ann"), ("b", "carl"), ("c", "ann")):
        store.rate(reply, user, DOWN, f"said by {user}")
    store.snapshot()
    number, first = store.forget("ann", None)  # two replies with bob's word on one, and a word on bob's
    assert number == 2 + 3
    assert first is not None
    assert began <= first <= time.time()
    left = (tmp_path / SNAPSHOT).read_text()
    assert json.loads(left) == {"prompt": "p", "completion": "r b", "label": False}
    content = b"".join(path.read_bytes() for path in (tmp_path / ".rlhf").iterdir())
    assert (b"r a" in content, b"said by ann" in content, b"said by bob" in content) == (False, False, False)
    assert b"said by carl" in content
    assert store.forget(None, "b") == (2, pytest.approx(first, abs=5.0))
    assert (tmp_path / SNAPSHOT).read_text() == ""


def test_the_summary_has_a_row_for_each_model(store: FeedbackStore) -> None:
    store.keep(KeptReply("d", "run-2", "", "text", "r d", 3, 2))
    store.rate("a", "ann", DOWN, "too long")
    store.rate("b", "ann", UP, "nice")
    store.rate("d", "ann", DOWN, "")
    newest, oldest = store.summary()
    assert tuple(newest) == ("run-2", 1, 1, 0, ())
    assert tuple(oldest) == ("run-1", 3, 2, 1, ("too long",))


def test_others_can_read_neither_the_store_nor_the_snapshot(store: FeedbackStore, tmp_path: Path) -> None:
    store.rate("a", "ann", UP, "")
    renew_snapshot(tmp_path)
    files = [*(tmp_path / ".rlhf").iterdir(), tmp_path / SNAPSHOT]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    (tmp_path / FEEDBACK).chmod(0o644)
    with pytest.raises(EnvironmentFault, match="mode 644: other users can read it"):
        FeedbackStore(tmp_path)


def test_a_damaged_store_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / ".rlhf").mkdir()
    (tmp_path / FEEDBACK).touch(0o600)
    (tmp_path / FEEDBACK).write_bytes(b"no database" * 100)
    with pytest.raises(EnvironmentFault, match="Move it away to begin anew"):
        FeedbackStore(tmp_path)


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", ""),
        (b"[1]", ""),
        (b"[" * 100_000, ""),
        (b'{"id": "x"}', "id"),
        (b'{"chosen": "x", "rating": "up"}', "id"),
        (b'{"id": "x", "rating": "up", "chosen": "y"}', "chosen"),
        (b'{"id": "x", "rating": "up", "stars": 5}', "stars"),
        (b'{"id": "x", "rating": "great"}', "rating"),
        (b'{"id": "x", "rating": 1}', "rating"),
        (b'{"id": "", "rating": "up"}', "id"),
        (b'{"id": "x", "rating": "up", "user": ["x"]}', "user"),
        (b'{"id": "x", "rating": "up", "user": "a\\u0007b"}', "user"),
        (b'{"id": "x", "rating": "up", "comment": "a\\u001b[31m"}', "comment"),
        (b'{"id": "x\\n", "rating": "up"}', "id"),
        (json.dumps({"id": "x", "rating": "up", "user": "a" * 201}).encode(), "user"),
        (b" " * (MAX_FEEDBACK_BYTES + 1), ""),
    ],
)
def test_a_wrong_body_is_refused_with_its_field(body: bytes, field: str) -> None:
    with pytest.raises(Refused) as error:
        parsed(body)
    assert (error.value.field, error.value.status) == (field, 400)


def test_a_comment_may_have_several_lines() -> None:
    said = parsed(json.dumps({"chosen": "x", "rejected": "y", "comment": "first\n\tsecond", "user": "Ån"}).encode())
    assert said == (("x", "y"), None, "first\n\tsecond", "Ån")


# ---------------------------------------------------------------- the front


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_export(tmp_path_factory.mktemp("exports") / "run-1", policy(3, "qwen3"))


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_export(tmp_path_factory.mktemp("exports") / "run-2", policy(4, "qwen3"))


@pytest.fixture
def keeping(front: Callable[..., Served], export: Path) -> Callable[..., Served]:
    return partial(front, export)


def say(served: Served, **body: Any) -> httpx.Response:
    return served.client.post("/v1/feedback", json=body)


def streamed_id(served: Served, prompt: str) -> tuple[str, str]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "stream": True, "temperature": 0}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    parts = [json.loads(line) for line in lines[:-1]]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    return parts[0]["id"], text


@pytest.mark.integration
def test_a_reply_is_rated_by_its_id_and_kept_for_training(keeping: Callable[..., Served], tmp_path: Path) -> None:
    served = keeping(keep_days=30)
    whole = served.ask("hello", max_tokens=12, user="ann").json()
    identity, text = streamed_id(served, "good morning")
    completed = served.client.post("/v1/completions", json={"prompt": "so", "max_tokens": 4}).json()
    for reply, rating in ((whole["id"], "up"), (identity, "down"), (completed["id"], "up")):
        answer = say(served, id=reply, rating=rating, user="ann", comment="because")
        assert (answer.status_code, answer.json()) == (200, {"object": "feedback", "kept": True})
    for body, status, field in (
        ({"id": "chatcmpl-nobody", "rating": "up"}, 404, "id"),
        ({"chosen": whole["id"], "rejected": identity}, 400, "rejected"),
        ({"chosen": whole["id"], "rejected": "nobody"}, 404, "chosen"),
    ):
        error = say(served, **body)
        assert (error.status_code, error.json()["error"]["param"]) == (status, field)
        assert error.json()["error"]["type"] == "invalid_request_error"
    without_key = httpx.post(f"{served.url}/v1/feedback", json={"id": identity, "rating": "up"}, trust_env=False)
    assert without_key.status_code == 401
    foreign = served.client.post(
        "/v1/feedback", json={"id": identity, "rating": "up"}, headers={"Origin": "http://elsewhere.example"}
    )
    assert foreign.status_code == 403
    metrics = served.client.get("/metrics").text
    assert 'rlhf_feedback_total{model_version="run-1",rating="up"} 2.0' in metrics
    renew_snapshot(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / SNAPSHOT).read_text().splitlines()]
    content = whole["choices"][0]["message"]["content"]
    assert rows[:2] == [
        {"prompt": "hello", "completion": content, "label": True},
        {"prompt": "good morning", "completion": text, "label": False},
    ]
    with closing(sqlite3.connect(tmp_path / FEEDBACK)) as database:
        kept = database.execute(
            "SELECT run_id, user, reply_tokens FROM replies WHERE id = ?", (whole["id"],)
        ).fetchone()
    assert kept == ("run-1", "ann", whole["usage"]["completion_tokens"])


@pytest.mark.integration
def test_nothing_is_kept_unless_asked_for(keeping: Callable[..., Served], tmp_path: Path) -> None:
    served = keeping()
    identity = served.ask("hello", max_tokens=4).json()["id"]
    refused = say(served, id=identity, rating="up")
    assert refused.status_code == 404
    assert "--keep-replies DAYS" in refused.json()["error"]["message"]
    assert not (tmp_path / FEEDBACK).exists()


@pytest.mark.integration
def test_a_kill_loses_no_word_that_was_answered_and_doubles_none(
    keeping: Callable[..., Served], tmp_path: Path
) -> None:
    served = keeping(keep_days=30)
    identities = [served.ask(f"hello {i}", max_tokens=2).json()["id"] for i in range(24)]
    answered: set[str] = set()

    def rate(identity: str) -> None:
        try:
            if say(served, id=identity, rating="up", user="ann").status_code == 200:
                answered.add(identity)
        except httpx.TransportError:
            pass

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(rate, identity) for identity in identities]
        while len(answered) < 6:
            time.sleep(0.001)
        served.process.kill()
        for word in waiting:
            word.result()
    served.end()
    assert len(answered) >= 6
    with closing(FeedbackStore(tmp_path)) as store:
        first = len(list(store.rows()))
        assert len(answered) <= first <= 24
    again = keeping(keep_days=30)
    for identity in identities:
        assert say(again, id=identity, rating="up", user="ann").status_code == 200
    with closing(FeedbackStore(tmp_path)) as store:
        assert len(list(store.rows())) == 24


# ---------------------------------------------------------------- two models side by side


def test_a_conversation_stays_with_its_side() -> None:
    shares = [sum(is_within(f"user {i}", share) for i in range(4000)) / 4000 for share in (0.0, 0.1, 1.0)]
    assert shares == [0.0, pytest.approx(0.1, abs=0.02), 1.0]
    first = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]}
    later = {
        "messages": [*first["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]
    }
    assert conversation(first) == conversation(later) != conversation({"messages": [{"role": "user", "content": "x"}]})
    assert conversation(first | {"user": "ann"}) == conversation({"user": "ann", "prompt": "else"})


@pytest.mark.integration
def test_a_challenger_answers_its_share_and_both_are_counted_and_priced(
    keeping: Callable[..., Served], rival: Path, tmp_path: Path
) -> None:
    served = keeping(keep_days=30, challenger=rival, share=0.5)
    assert served.said[0].startswith("Serving run-1 and run-2 at")
    assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["run-1", "run-2"]
    answers = {user: served.ask("hello", max_tokens=8, user=user, model="champion").json()
               for user in map(str, range(16))}  # fmt: skip
    for user, answer in answers.items():
        assert say(served, id=answer["id"], rating="up", user=user).status_code == 200
    expected = {user: "run-2" if is_within(f"user {user}", 0.5) else "run-1" for user in answers}
    with closing(FeedbackStore(tmp_path)) as store:
        assert {v.run_id: v.rated for v in store.summary()} == Counter(expected.values())
    alone = {name: served.ask("hello", max_tokens=8, model=name).json() for name in ("run-1", "run-2")}
    said = {name: answer["choices"][0]["message"]["content"] for name, answer in alone.items()}
    assert said["run-1"] != said["run-2"]
    assert {user: answer["choices"][0]["message"]["content"] for user, answer in answers.items()} == {
        user: said[name] for user, name in expected.items()
    }
    assert served.ask("hello", model="run-3").json()["error"]["message"].endswith("run-1, run-2 is, or champion.")
    streamed_id(served, "hello")
    metrics = served.client.get("/metrics").text
    for name in ("run-1", "run-2"):
        assert f'rlhf_reply_tokens_total{{model_version="{name}"}}' in metrics
        prices = [line for line in metrics.splitlines() if line.startswith("llm_total_cost{")]
        assert any(f'model_version="{name}"' in line for line in prices)
    served.end()
    usd = [served_of(tmp_path, name).usd for name in ("run-1", "run-2")]
    assert usd[0] == pytest.approx(usd[1], rel=0.2)
    assert usd[0] > 0


@pytest.mark.integration
def test_two_replies_side_by_side_are_one_of_each_model(
    keeping: Callable[..., Served], rival: Path, tmp_path: Path
) -> None:
    served = keeping(keep_days=30, challenger=rival, share=0.0, compares=True)
    alone = {served.ask("hello", max_tokens=8, model=name).json()["choices"][0]["message"]["content"]
             for name in ("run-1", "run-2")}  # fmt: skip
    both = served.ask("hello", max_tokens=8, n=2).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert {choice["message"]["content"] for choice in both["choices"]} == alone
    assert both["usage"]["completion_tokens"] > 8
    first, second = (choice["id"] for choice in both["choices"])
    assert say(served, chosen=second, rejected=first, user="ann").status_code == 200
    refused = served.ask("hello", n=2, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    with closing(FeedbackStore(tmp_path)) as store:
        (row,) = store.rows()
    assert (row["chosen"], row["rejected"]) == tuple(
        both["choices"][number]["message"]["content"] for number in (1, 0)
    )
