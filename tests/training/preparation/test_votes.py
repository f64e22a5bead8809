"""Votes that stand one a line: the same examples as a column per annotator gives."""

import json
from pathlib import Path
from typing import Any

from config.sections.data import FileSource
from tests.support.parsed_rows import Parsed, read_as
from training.preparation.columns import column_names
from training.preparation.sources import SourceRow, Table
from training.preparation.votes import read_vote_lines, votes_by_pair


def line(annotator: Any, vote: Any, prompt: Any = "p", first: str = "a", second: str = "b") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "response1": first,
        "response2": second,
        "annotator": annotator,
        "vote": vote,
        "left": 1,
        "time": 1.5,
    }


def read(*rows: Any) -> Parsed:
    return read_as("votes", *rows)


def winners(parsed: Parsed) -> list[list[str]]:
    return [[pair.chosen for pair in example.pairs] for example in parsed.examples]


def test_the_majority_of_all_annotators_of_a_pair_wins() -> None:
    parsed = read(line("ada", 1), line("ada", 2, "q"), line("bob", 2), line("cyd", 2), line("bob", 0, "q"))
    assert winners(parsed) == [["b"], []]
    assert (parsed.rows_read, parsed.ties) == (2, 1)
    assert [example.origin.number for example in parsed.examples] == [1, 2]


def test_a_later_vote_of_an_annotator_replaces_the_earlier() -> None:
    assert winners(read(line("ada", 1), line("bob", 1), line("ada", 2), line("bob", 2))) == [["b"]]


def test_a_skip_is_no_vote_and_takes_an_earlier_one_back() -> None:
    assert winners(read(line("ada", 1), line("bob", None))) == [["a"]]
    assert winners(read(line("ada", 1), line("ada", None), line("bob", 2))) == [["b"]]
    assert winners(read(line("ada", None))) == [[]]


def test_a_conversation_is_a_prompt_and_other_replies_are_another_pair() -> None:
    talk = [{"role": "user", "content": "hello"}]
    parsed = read(line("ada", 1, talk), line("bob", 1, talk), line("ada", 2, talk, "a", "c"))
    assert winners(parsed) == [["a"], ["c"]]


def test_what_is_no_vote_is_refused_and_the_rest_kept() -> None:
    parsed = read(
        line("ada", 3), line("ada", 1, "q"), "x", {"prompt": "r", "response1": "a", "annotator": "ada", "vote": 1}
    )
    assert winners(parsed) == [["a"]]
    assert [(refusal.origin.number, refusal.reason) for refusal in parsed.refusals] == [
        (1, "not_a_vote"),
        (3, "wrong_type"),
        (4, "missing_column"),
    ]


def test_lines_without_an_annotator_are_votes_of_their_own() -> None:
    anonymous = {key: value for key, value in line("", 1).items() if key != "annotator"}
    assert winners(read(line("ada", 2), anonymous, anonymous)) == [["a"]]


def test_a_table_with_a_column_per_annotator_stays_as_it_is() -> None:
    columns = column_names("votes", {}, "data.source")
    table = Table("v", "line", [SourceRow(1, line("ada", 1) | {"annotator1": 2, "annotator2": 2, "annotator3": 2})])
    assert votes_by_pair(table, columns) == (table, columns)


# ---------------------------------------------------------------- a file that people write to


def votes_file(path: str) -> FileSource:
    return FileSource(kind="file", path=path, format="votes", columns={})


def test_a_line_that_was_cut_or_edited_by_hand_is_refused_alone(tmp_path: Path) -> None:
    good = [json.dumps(line(name, 1)).encode() for name in ("ada", "bob", "cyd")]
    other = json.dumps(line("ada", True, "q")).encode()
    deep = b"[" * 5000 + b"]" * 5000
    lines = [good[0], b"{not json", good[1], b"\xff\xfe", b"[1]", other, b"", good[2][:20], deep]
    (tmp_path / "votes.jsonl").write_bytes(b"\n".join(lines))
    table, refusals = read_vote_lines(votes_file("votes.jsonl"), tmp_path, "data.vote_source")
    assert [(row.number, row.content["annotator"]) for row in table.rows] == [(1, "ada"), (3, "bob")]
    assert [(refusal.origin.number, refusal.reason) for refusal in refusals] == [
        (2, "not_json"), (4, "not_unicode"), (5, "wrong_type"), (6, "not_a_vote"), (8, "not_json"),
        (9, "not_json"),
    ]  # fmt: skip
    assert refusals[0].origin.original == "{not json"


def test_one_bad_vote_on_a_pair_leaves_the_good_ones(tmp_path: Path) -> None:
    lines = [line("ada", 2), line("bob", "yes"), line("cyd", 2)]
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    table, refusals = read_vote_lines(votes_file("votes.jsonl"), tmp_path, "data.vote_source")
    assert winners(read(*[row.content for row in table.rows])) == [["b"]]
    assert [refusal.detail for refusal in refusals] == ["'yes' is not one of 0 (tie), 1, 2, null (skipped)"]


def test_a_file_that_is_not_there_yet_has_no_votes(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("absent.jsonl", "empty.jsonl"):
        table, refusals = read_vote_lines(votes_file(name), tmp_path, "data.vote_source")
        assert (table.rows, refusals) == ([], [])
