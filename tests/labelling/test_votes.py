"""The files of pairs and votes: appended whole, read strictly, the last vote of an annotator counts."""

import json
import os
import threading
from pathlib import Path

import pytest

from config.errors import DataError, EnvironmentFault
from labelling.votes import Pair, Vote, annotator_name, append, current, read_pairs, read_votes, shown_left

PAIR = Pair("p", "a", "b", seed=3)
OTHER = Pair(
    [{"role": "user", "content": "q"}], "\u2028 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "d"
)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "labels" / "votes.jsonl"
    append(path, [Vote(PAIR, "ada", 1, 2)], now=12.0)
    append(path, [Vote(OTHER, "bob", 0), Vote(PAIR, "bob", None, 1)], now=13.0)
    assert [(vote.pair[:3], *vote[1:]) for vote in read_votes(path)] == [
        (PAIR[:3], "ada", 1, 2), (OTHER[:3], "bob", 0, None), (PAIR[:3], "bob", None, 1),
    ]  # fmt: skip
    assert [json.loads(line)["time"] for line in path.read_text().splitlines()] == [12.0, 13.0, 13.0]


def test_the_last_vote_of_an_annotator_on_a_pair_counts() -> None:
    result = current([Vote(PAIR, "ada", 1), Vote(PAIR, "bob", 1), Vote(OTHER, "ada", 2), Vote(PAIR, "ada", None)])
    assert [(name, vote.vote) for (name, _), vote in result.items()] == [("bob", 1), ("ada", 2), ("ada", None)]


def test_a_cut_last_line_is_passed_over_and_put_aside_by_the_next_vote(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append(path, [Vote(PAIR, "ada", 1)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert [vote.annotator for vote in read_votes(path)] == ["ada"]
    append(path, [Vote(PAIR, "bob", 2)])
    assert [vote.annotator for vote in read_votes(path)] == ["ada", "bob"]
    assert (tmp_path / "votes.cut").read_bytes() == whole[:30] + b"\n"


def test_a_last_line_without_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append(path, [Vote(PAIR, "ada", 1)])
    path.write_bytes(path.read_bytes()[:-1])
    append(path, [Vote(PAIR, "bob", 2)])
    assert [vote.annotator for vote in read_votes(path)] == ["ada", "bob"]
    assert not (tmp_path / "votes.cut").exists()


def test_writers_at_once_lose_no_vote(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    threads = [
        threading.Thread(target=lambda n=n: [append(path, [Vote(PAIR, f"a{n}", i % 3)]) for i in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_votes(path)) == 80


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is a list"),
        ('{"prompt": "p", "response1": "a", "response2": "b", "annotator": "ada", "vote": 3}', "vote=3"),
        ('{"prompt": "p", "response1": "a", "response2": "b", "annotator": "ada", "vote": true}', "vote=True"),
        ('{"prompt": "p", "response1": "a", "response2": "b", "annotator": "ada"}', "vote=''"),
        ('{"prompt": "p", "response1": "a", "response2": "b", "annotator": " ", "vote": 1}', "annotator ' '"),
        ('{"prompt": "p", "response1": "a", "response2": 7, "annotator": "ada", "vote": 1}', "response2=7 is"),
        (
            '{"prompt": [{"role": "user"}], "response1": "a", "response2": "b", "annotator": "ada", "vote": 1}',
            "prompt",
        ),
    ],
)
def test_a_line_that_was_edited_wrongly_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "votes.jsonl"
    append(path, [Vote(PAIR, "ada", 1)])
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"votes\.jsonl line 2") as raised:
        read_votes(path)
    assert named in str(raised.value)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="Is a directory"):
        append(tmp_path, [Vote(PAIR, "ada", 1)])


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "votes.jsonl"
    append(path, [Vote(PAIR, "ada", 1)])
    before, write, room = path.read_bytes(), os.write, [40]

    def full(descriptor: int, content: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        append(path, [Vote(PAIR, "bob", 1)])
    assert path.read_bytes() == before


def test_equal_pairs_are_one_and_the_seed_is_no_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "p", "response1": "a", "response2": "b", "seed": seed} for seed in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "response2": "c"}]))
    assert [pair.response2 for pair in read_pairs(path)] == ["b", "c"]
    assert PAIR.key == PAIR._replace(seed=9).key != PAIR._replace(response1="c").key


def test_each_response_is_on_the_left_half_of_the_time() -> None:
    pairs = [Pair(f"p{i}", "a", "b", seed=1) for i in range(2000)]
    ada, bob = ([shown_left(pair, name) for pair in pairs] for name in ("ada", "bob"))
    assert 900 < ada.count(1) < 1100
    assert 900 < sum(a == b for a, b in zip(ada, bob, strict=True)) < 1100
    assert ada == [shown_left(pair, "ada") for pair in pairs]
    assert 900 < sum(a == shown_left(pair._replace(seed=2), "ada") for a, pair in zip(ada, pairs, strict=True)) < 1100


def test_names_are_normalised_or_refused() -> None:
    assert annotator_name("  Ada   L. ") == "Ada L."
    assert annotator_name("e\u0301") == "\u00e9"
    for name in ("", " ", None, 7, "a\x00b", "a\u202eb", "x" * 61):
        with pytest.raises(DataError, match="1 to 60 printable"):
            annotator_name(name)
