"""Files as people have them: each is recognised, and gives the examples that it stands for."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load
from tests.conftest import ROOT
from training.preparation.cleaning import TextRules
from training.preparation.examples import parse_table
from training.preparation.formats import Example, column_names
from training.preparation.inspection import inspect, recognised
from training.preparation.layouts import in_format
from training.preparation.sources import SourceRow, Table

USER = {"role": "user", "content": "Hello?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hi there.", "What."))
HH = "\n\nHuman: Hello?\n\nAssistant: Yes?\n\nHuman: Help me.\n\nAssistant: "


def read(*rows: Any, **columns: str) -> tuple[str, list[Example]]:
    """The format of a table, and its examples."""
    table = Table("rows.jsonl", "line", [SourceRow(i, row) for i, row in enumerate(rows, 1)])
    form, named = recognised(table, None, columns)
    table, names = in_format(table, form, column_names(form, named, "data.source"))
    parsed = parse_table(table, form, names, TextRules(2000, 2000, ()))
    assert [refusal.detail for refusal in parsed.refusals] == []
    return form, parsed.examples


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (
            {"chosen": f"{HH}Gladly.", "rejected": f"{HH}No."},
            [USER, {**GOOD, "content": "Yes?"}, {**USER, "content": "Help me."}],
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": "Hello?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "Hello?"),
    ],
)  # fmt: skip
def test_a_prompt_that_both_replies_repeat_is_taken_from_them(row: Any, prompt: Any) -> None:
    form, [example] = read(row)
    assert (form, example.prompt) == ("pairs", prompt)
    [pair] = example.pairs
    assert (pair.chosen, pair.rejected) in {("Gladly.", "No."), ("Hi there.", "What.")}


def test_replies_to_different_prompts_are_refused() -> None:
    rows = [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}] * 3
    other = {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "Other?"}, BAD]}
    table = Table("rows", "line", [SourceRow(i, row) for i, row in enumerate([*rows, other])])
    table, names = in_format(table, "pairs", column_names("pairs", {}, "s"))
    parsed = parse_table(table, "pairs", names, TextRules(2000, 2000, ()))
    assert (len(parsed.examples), len(parsed.refusals)) == (3, 1)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, GOOD]},
        {"conversations": [
            {"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi there."}
        ]},
    ],
)  # fmt: skip
def test_messages_are_a_demonstration_of_their_last_one(row: Any) -> None:
    form, [example] = read(row)
    assert form == "instructions"
    assert (example.prompt, example.completions) == ([USER], ("Hi there.",))


@pytest.mark.parametrize(
    "more",
    [
        {"responses": ["b", "a", "c"], "ranks": [1, 0, 2]},
        {"responses": ["b", "a", "c"], "scores": [5, 9.5, 1]},
        {"responses": [{"text": t, "rank": r} for t, r in (("b", 2), ("a", 1), ("c", 3))]},
        {"completions": [{"response": r, "score": s} for r, s in (("b", 2), ("a", 3), ("c", 1))]},
    ],
)  # fmt: skip
def test_ranked_replies_give_every_pair_of_unequal_rank(more: Any) -> None:
    form, [example] = read({"prompt": "Hello?", **more})
    assert form == "trees"
    assert {pair[:2] for pair in example.pairs} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert example.completions == ("a",)


def test_several_rejected_replies_are_each_worse_than_the_chosen_one() -> None:
    form, examples = read({"prompt": "Hello?", "chosen": "a", "rejected": ["b", "c"]})
    assert form == "pairs"
    assert [pair[:2] for each in examples for pair in each.pairs] == [("a", "b"), ("a", "c")]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("model_a", "x"), ("B", "y"), ("response2", "y"), ("left", "x"), ("1", "x"), (2, "y"),
     ("tie", None), ("tie (bothbad)", None), (0, None)],
)  # fmt: skip
def test_a_winner_may_be_written_in_many_ways(value: Any, chosen: str | None) -> None:
    row = {"prompt": "Hello?", "response_a": "x", "response_b": "y", "winner": value}
    form, [example] = read(row)
    assert form == "votes"
    assert [pair.chosen for pair in example.pairs] == ([chosen] if chosen else [])
    _, [named] = read({**row, "verdict": row.pop("winner")}, vote="verdict")
    assert named.pairs == example.pairs


def test_one_vote_a_row_counts_with_those_on_the_same_pair_whatever_the_columns() -> None:
    rows = [
        {"prompt": "Hello?", "response1": "x", "response2": "y", "rater": who, "verdict": said}
        for who, said in (("ada", "A"), ("bob", "B"), ("cy", "B"))
    ]
    form, [example] = read(*rows, annotator="rater", vote="verdict")
    assert (form, example.pairs[0].chosen) == ("votes", "y")


def test_a_vote_that_is_none_is_refused_with_what_it_may_be(tmp_path: Path) -> None:
    row = {"prompt": "Hello?", "response1": "x", "response2": "y", "winner": "perhaps"}
    good = [{**row, "prompt": f"Hello {n}?", "winner": "A"} for n in range(60)]
    (tmp_path / "v.jsonl").write_text("\n".join(map(json.dumps, [*good, row])))
    params = load(ROOT / "recipes" / "demo.yaml")
    found = inspect("v.jsonl", tmp_path, params, None, {})
    assert found.refused["not_a_vote"]["detail"].endswith("is not one of 0 (tie), 1, 2, A, B, tie")
    assert found.source["columns"] == {"annotators": "winner"}
