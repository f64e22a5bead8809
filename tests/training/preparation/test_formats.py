from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import DataError, ParamsError
from tests.support.parsed_rows import read_as, table_of
from training.preparation.columns import check_columns, column_names
from training.preparation.formats import majority

USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "good day"}


def vote(first: Any, second: Any, third: Any, **others: Any) -> dict[str, Any]:
    return {
        "prompt": "p",
        "response1": "a",
        "response2": "b",
        "annotator1": first,
        "annotator2": second,
        "annotator3": third,
        **others,
    }


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        ([1, 1, 2], 1),
        ([2, 2, 2], 2),
        ([0, 1, 1], 1),
        ([0, 0, 1], 0),
        ([0, 1, 2], 0),
        ([1, 2], 0),
        ([1], 1),
        ([2, 2, 1, 0], 0),
        ([2, 2, 2, 0, 1], 2),
    ],
)
def test_more_than_half_of_all_annotators_decide(votes: list[int], winner: int) -> None:
    assert majority(votes) == winner


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=1))
def test_swapping_the_replies_swaps_the_winner(votes: list[int]) -> None:
    swapped = majority([{0: 0, 1: 2, 2: 1}[v] for v in votes])
    assert swapped == {0: 0, 1: 2, 2: 1}[majority(votes)]


def test_pairs_give_a_pair_and_a_demonstration() -> None:
    (example,) = read_as("pairs", {"prompt": " p ", "chosen": "a", "rejected": "b"}).examples
    assert (example.prompt, example.pairs[0][:2], example.completions) == ("p", ("a", "b"), ("a",))


def test_votes_put_the_majority_first_and_keep_the_prompt_of_a_tie() -> None:
    parsed = read_as("votes", vote(2, "2", 1.0), vote(1, 1, 1), vote(0, 1, 2))
    assert [[pair[:] for pair in example.pairs] for example in parsed.examples] == [
        [("b", "a", False)],
        [("a", "b", True)],
        [],
    ]
    assert parsed.ties == 1
    assert parsed.examples[2].completions == ()


@pytest.mark.parametrize("cell", [True, None, "", "x", 3, -1, 1.5, [1], float("nan")])
def test_a_cell_that_is_no_vote_refuses_its_row(cell: Any) -> None:
    parsed = read_as("votes", vote(1, cell, 1))
    assert [(r.reason, r.origin.column) for r in parsed.refusals] == [("not_a_vote", "annotator2")]
    assert not parsed.examples


def test_any_number_of_annotators_is_read_from_the_columns_named() -> None:
    parsed = read_as("votes", {"prompt": "p", "response1": "a", "response2": "b", "x": "2"}, annotators="x")
    assert parsed.examples[0].pairs[0].chosen == "b"


def test_every_row_is_either_an_example_or_a_refusal_with_its_place() -> None:
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": True, "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": ""},
        {"prompt": "p", "chosen": "a b\n", "rejected": "a b"},
        {"prompt": "p", "chosen": "a"},
        ["p", "a", "b"],
        {"prompt": "x" * 201, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "x" * 101},
    ]
    parsed = read_as("pairs", *rows)
    assert [(r.reason, r.origin.number, r.origin.column) for r in parsed.refusals] == [
        ("wrong_type", 2, "chosen"),
        ("empty", 3, "rejected"),
        ("identical_replies", 4, "rejected"),
        ("missing_column", 5, "rejected"),
        ("wrong_type", 6, ""),
        ("prompt_too_long", 7, "prompt"),
        ("response_too_long", 8, "rejected"),
    ]
    assert [r.origin.original for r in parsed.refusals] == rows[1:]
    assert (parsed.rows_read, len(parsed.examples)) == (8, 1)


def test_an_input_column_is_put_below_the_prompt_if_it_is_named_and_not_empty() -> None:
    rows = [{"instruction": "fix", "input": text, "completion": "a"} for text in ("this", "", " ", None)]
    named = read_as("instructions", *rows, prompt="instruction", input="input")
    assert [example.prompt for example in named.examples] == ["fix\n\nthis", "fix", "fix", "fix"]
    assert read_as("instructions", rows[0], prompt="instruction").examples[0].prompt == "fix"


def test_prompts_may_be_bare_strings() -> None:
    parsed = read_as("prompts", "why ?", {"prompt": "how ?"}, 3)
    assert [example.prompt for example in parsed.examples] == ["why ?", "how ?"]
    assert [r.origin.number for r in parsed.refusals] == [3]


def test_conversations_are_read_and_replies_may_repeat_the_prompt() -> None:
    other = {"role": "assistant", "content": "go"}
    parsed = read_as(
        "pairs",
        {"prompt": [USER], "chosen": [REPLY], "rejected": [other]},
        {"prompt": "hello", "chosen": [USER, REPLY], "rejected": [{"role": "human", "content": "hello"}, other]},
        {"prompt": "bye", "chosen": [USER, REPLY], "rejected": [USER, other]},
        {"prompt": [USER, REPLY], "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [USER], "rejected": "b"},
        {"prompt": [], "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "robot", "content": "x"}], "chosen": "a", "rejected": "b"},
    )
    assert [(example.prompt, example.pairs[0][:2]) for example in parsed.examples] == [
        ([USER], ("good day", "go")),
        ("hello", ("good day", "go")),
    ]
    assert [r.reason for r in parsed.refusals] == [
        "other_prompt",
        "ends_with_assistant",
        "ends_with_user",
        "empty",
        "role",
    ]


def test_a_csv_row_with_a_field_too_many_is_refused() -> None:
    parsed = read_as("prompts", {"prompt": "p", None: "3 fields under a header of 1"})
    assert [r.reason for r in parsed.refusals] == ["field_count"]


def test_a_column_absent_from_the_whole_file_is_named_beside_those_present() -> None:
    with pytest.raises(DataError) as failure:
        check_columns(
            table_of({"question": "p", "answer": "a"}),
            "instructions",
            column_names("instructions", {}, "data.source"),
            "data.source",
        )
    message = str(failure.value)
    assert "'prompt'" in message
    assert "question, answer" in message
    assert "data.source.columns.prompt" in message


def test_an_absent_annotator_column_is_named() -> None:
    rows = table_of({"prompt": "p", "response1": "a", "response2": "b", "annotator1": 1})
    with pytest.raises(DataError, match="'annotator2'"):
        check_columns(rows, "votes", column_names("votes", {}, "data.source"), "data.source")


def test_a_column_absent_from_one_row_only_is_no_fault_of_the_file() -> None:
    rows = table_of({"prompt": "p"}, {"prompt": "p", "completion": "a"})
    check_columns(rows, "instructions", column_names("instructions", {}, "data.source"), "data.source")


def test_a_misspelt_column_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParamsError, match="did you mean chosen"):
        column_names("pairs", {"choosen": "x"}, "data.source")
