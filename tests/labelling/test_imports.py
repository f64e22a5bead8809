"""Exports of Label Studio and Argilla: every entry becomes votes or a refusal with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import DataError, ParamsError
from labelling.imports import read_export

TEXTS = {"prompt": "p", "text1": "a", "text2": "b"}
FIELDS = {"prompt": "p", "response1": "a", "response2": "b"}


def export(tmp_path: Path, *entries: Any) -> Path:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(entries))
    return path


def selected(side: str, by: Any = 10, **others: Any) -> dict[str, Any]:
    result = {"from_name": "pw", "to_name": "text1", "type": "pairwise", "value": {"selected": side}}
    return {"id": 1, "completed_by": by, "was_cancelled": False, "ground_truth": False, "result": [result], **others}


def chosen(*choices: str, by: Any = 11, name: str = "better") -> dict[str, Any]:
    return {
        "completed_by": by,
        "was_cancelled": False,
        "result": [{"type": "choices", "from_name": name, "value": {"choices": list(choices)}}],
    }


def test_label_studio_gives_a_vote_per_annotation(tmp_path: Path) -> None:
    annotations = [
        selected("right"),
        selected("Tie", by=11),
        selected("left", by={"id": 4, "email": "ada@example.org"}),
        selected("left", 12, was_cancelled=True),
    ]
    votes, refused = read_export(
        export(tmp_path, {"id": 7, "data": TEXTS, "annotations": annotations}), "label-studio", {}
    )
    assert refused == []
    assert [(vote.annotator, vote.vote) for vote in votes] == [
        ("label-studio 10", 2),
        ("label-studio 11", 0),
        ("ada@example.org", 1),
        ("label-studio 12", None),
    ]
    assert {vote.pair[:3] for vote in votes} == {("p", "a", "b")}


def test_label_studio_refuses_what_is_no_vote_and_goes_on(tmp_path: Path) -> None:
    path = export(
        tmp_path,
        {"prompt": "p", "text1": "a", "text2": "b", "pw": "left", "annotator": 1},
        {"data": {"prompt": "p", "text1": "a"}, "annotations": [selected("left")]},
        {"data": TEXTS | {"text2": "a"}, "annotations": [selected("left")]},
        {"data": TEXTS | {"text2": 5}, "annotations": [selected("left")]},
        {
            "data": TEXTS,
            "annotations": [
                selected("neither"),
                selected("left", None),
                {"completed_by": 1, "result": []},
                "x",
                selected("left"),
            ],
        },
        "x",
    )
    votes, refused = read_export(path, "label-studio", {})
    assert [(vote.annotator, vote.vote) for vote in votes] == [("label-studio 10", 1)]
    assert [(item.number, item.reason) for item in refused] == [
        (1, "not_a_task"),
        (2, "missing_column"),
        (3, "identical_replies"),
        (4, "no_text"),
        (5, "not_a_vote"),
        (5, "no_annotator"),
        (5, "no_annotator"),
        (5, "no_choice"),
        (6, "not_a_task"),
    ]


def test_argilla_gives_a_vote_per_user(tmp_path: Path) -> None:
    answers = [{"value": "response2", "user_id": "u1"}, {"value": "tie", "user_id": "u2"}]
    ranking = [{"value": ["response1", "response2"], "user_id": "u3"}]
    ties = [{"value": [{"value": "response1", "rank": 1}, {"value": "response2", "rank": 1}], "user_id": "u4"}]
    records = [
        {"id": "1", "fields": FIELDS, "responses": {"better": answers, "rank": ranking}},
        {"id": "2", "fields": FIELDS, "responses": {"rank": ties}},
    ]
    path = export(tmp_path, *records)
    for question, expected in (
        ("better", [("argilla u1", 2), ("argilla u2", 0)]),
        ("rank", [("argilla u3", 1), ("argilla u4", 0)]),
    ):
        votes, refused = read_export(path, "argilla", {}, question)
        assert refused == []
        assert [(vote.annotator, vote.vote) for vote in votes] == expected


def answered(**said: Any) -> dict[str, Any]:
    responses = {name: [{"user_id": "u1", "value": value}] for name, value in said.items()}
    return {"id": "1", "fields": FIELDS, "responses": responses}


def test_ratings_and_comments_are_no_votes(tmp_path: Path) -> None:
    path = export(tmp_path, answered(preference="response1", politeness=2, comment="2"))
    votes, refused = read_export(path, "argilla", {}, "preference")
    assert ([vote.vote for vote in votes], refused) == ([1], [])
    votes, refused = read_export(
        export(tmp_path, answered(preference="response1", politeness=2, comment="fine")), "argilla", {}
    )
    assert ([vote.vote for vote in votes], refused) == ([1], [])
    with pytest.raises(DataError, match="no answer to politeness says which response is better"):
        read_export(export(tmp_path, answered(politeness=2)), "argilla", {})


def test_one_of_several_questions_that_could_be_the_vote_has_to_be_named(tmp_path: Path) -> None:
    path = export(tmp_path, answered(kinder="response1", better="response2"))
    with pytest.raises(ParamsError, match="asks for a preference in kinder and in better"):
        read_export(path, "argilla", {})
    with pytest.raises(ParamsError, match="has no such question, but kinder, better"):
        read_export(path, "argilla", {}, "best")
    assert [vote.vote for vote in read_export(path, "argilla", {}, "better")[0]] == [2]


def test_the_pairwise_control_is_the_vote_wherever_it_stands(tmp_path: Path) -> None:
    both = selected("right")
    both["result"] = [*chosen("left")["result"], *both["result"]]
    path = export(tmp_path, {"data": TEXTS, "annotations": [both]})
    assert [vote.vote for vote in read_export(path, "label-studio", {})[0]] == [2]


def test_responses_that_differ_in_indentation_are_a_pair(tmp_path: Path) -> None:
    record = {**answered(better="response1"), "fields": {**FIELDS, "response2": "    a"}}
    [vote], refused = read_export(export(tmp_path, record), "argilla", {})
    assert (vote.pair[1:3], refused) == (("a", "    a"), [])


def test_flattened_argilla_leaves_drafts_out_and_keeps_discarded_as_skipped(tmp_path: Path) -> None:
    record = {
        "id": "1",
        **FIELDS,
        "better.responses": ["response1", "response1", "response1"],
        "better.responses.users": ["u1", "u2", "u3"],
        "better.responses.status": ["submitted", "draft", "discarded"],
    }
    votes, refused = read_export(
        export(tmp_path, record, {"id": "2", **FIELDS, "better.responses": None}), "argilla", {}
    )
    assert refused == []
    assert [(vote.annotator, vote.vote) for vote in votes] == [("argilla u1", 1), ("argilla u3", None)]


def test_columns_of_another_name_are_found_by_saying_so(tmp_path: Path) -> None:
    path = export(tmp_path, {"data": {"ask": "p", "x": "a", "y": "b"}, "annotations": [chosen("y")]})
    assert [item.reason for item in read_export(path, "label-studio", {})[1]] == ["missing_column"]
    (vote,), refused = read_export(path, "label-studio", {"prompt": "ask", "response1": "x", "response2": "y"})
    assert (vote.vote, vote.pair[:3], refused) == (2, ("p", "a", "b"), [])


def test_a_file_that_is_no_export_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_export(tmp_path / "none.json", "argilla", {})
    path = tmp_path / "export.json"
    for content, named in (('[{"id"', "cannot be read as JSON"), ("{}", "holds one dict")):
        path.write_text(content)
        with pytest.raises(DataError, match=named):
            read_export(path, "argilla", {})
    with pytest.raises(ParamsError, match="label-studio or argilla"):
        read_export(path, "csv", {})
    with pytest.raises(ParamsError, match="chosen is not one of prompt"):
        read_export(path, "argilla", {"chosen": "x"})
