import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import DataError
from training.preparation.cleaning import Origin, Quarantine, Refusal, Refused, TextRules, same_prompt_key

RULES = TextRules(max_prompt_chars=20, max_response_chars=10, special_tokens=("<eos>",))


def refusals(*reason_names: str) -> list[Refusal]:
    return [
        Refusal(reason, f"detail {i}", Origin("rows.jsonl", "line", i, "chosen", {"n": i}))
        for i, reason in enumerate(reason_names)
    ]


def test_text_is_put_in_normal_form_and_keeps_its_inner_white_space() -> None:
    assert RULES.clean(" cafe\u0301\r\n  x\ry \n", "text") == "caf\u00e9\n  x\ny"
    assert RULES.clean("\n \n    return n\n", "text") == "    return n", "its indentation is content"
    assert RULES.clean("\tx", "text") == "\tx"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (True, "wrong_type"),
        (None, "wrong_type"),
        (3, "wrong_type"),
        (["a"], "wrong_type"),
        (b"a", "wrong_type"),
        ("", "empty"),
        (" \n\t", "empty"),
        ("a\ud800b", "not_unicode"),
        ("end <eos> here", "special_token"),
    ],
)
def test_what_is_no_usable_text_is_refused_with_its_reason_and_column(value: Any, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        RULES.clean(value, "chosen")
    assert (refused.value.reason, refused.value.column) == (reason, "chosen")


def test_limits_allow_their_own_value_and_no_more() -> None:
    assert RULES.clean_response("x" * 10, "r") == "x" * 10
    RULES.check_prompt_chars(20, "p")
    with pytest.raises(Refused) as reply:
        RULES.clean_response("x" * 11, "r")
    with pytest.raises(Refused) as prompt:
        RULES.check_prompt_chars(21, "p")
    assert (reply.value.reason, prompt.value.reason) == ("response_too_long", "prompt_too_long")


@given(st.text())
def test_a_clean_text_stays_as_it_is(text: str) -> None:
    try:
        clean = TextRules(10**6, 10**6, ()).clean(text, "text")
    except Refused:
        return
    assert TextRules(10**6, 10**6, ()).clean(clean, "text") == clean


def test_a_conversation_of_one_user_message_is_the_same_prompt_as_its_text() -> None:
    user = {"role": "user", "content": "hello there"}
    assert same_prompt_key([user]) == same_prompt_key("hello there")
    assert same_prompt_key([user, {"role": "assistant", "content": "hi"}]) != same_prompt_key("hello there")


def test_the_quarantine_file_tells_reason_place_column_and_the_original_row(tmp_path: Path) -> None:
    origin = Origin("rows.csv", "line", 7, "chosen", {"chosen": "half \ud800 é", "n": 1})
    Quarantine(tmp_path / "q.jsonl").add([Refusal("not_unicode", "why", origin)])
    row = json.loads((tmp_path / "q.jsonl").read_bytes())
    assert row == {
        "reason": "not_unicode",
        "detail": "why",
        "source": "rows.csv",
        "unit": "line",
        "number": 7,
        "column": "chosen",
        "original": {"chosen": "half \ud800 é", "n": 1},
    }


def test_a_row_nested_too_deep_to_be_copied_is_still_reported(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    refusal = Refusal("wrong_type", "why", Origin("rows.jsonl", "line", 3, "", deep))
    Quarantine(tmp_path / "q.jsonl").add([refusal])
    row = json.loads((tmp_path / "q.jsonl").read_text())
    assert (row["reason"], row["number"], row["original"]) == ("wrong_type", 3, None)


def quarantine(folder: Path, *reasons: str) -> Quarantine:
    quarantine = Quarantine(folder / "q.jsonl")
    quarantine.add(refusals(*reasons))
    return quarantine


def test_as_many_refused_rows_as_the_fraction_allows_pass(tmp_path: Path) -> None:
    quarantine(tmp_path, *["empty"] * 5).refuse_if_too_many(100, 0.05, tmp_path / "kept")
    quarantine(tmp_path).refuse_if_too_many(100, 0.0, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_one_refused_row_too_many_fails_with_the_top_reasons_and_their_first_places(tmp_path: Path) -> None:
    full = quarantine(tmp_path, "role", "empty", "empty", "empty", "role", "rank", "deleted")
    with pytest.raises(DataError) as failure:
        full.refuse_if_too_many(100, 0.05, tmp_path / "kept")
    message = str(failure.value)
    assert "3 empty (first: rows.jsonl line 1, chosen" in message
    assert "2 role (first: rows.jsonl line 0, chosen" in message
    assert "7 of 100" in message
    assert "runs/data/quarantine.jsonl" in message
    assert "\n" not in message
    assert (tmp_path / "kept").read_bytes() == (tmp_path / "q.jsonl").read_bytes()


def test_refusing_every_row_fails_whatever_the_fraction(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        quarantine(tmp_path, "empty", "empty").refuse_if_too_many(2, 1.0, tmp_path / "kept")
