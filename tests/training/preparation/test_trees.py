import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.parsed_rows import Parsed, read_as
from training.preparation.cleaning import TextRules

RULES = TextRules(1000, 500, ())
OASST = Path(__file__).parents[3] / "data/samples/oasst-trees/trees.jsonl"


def user(text: Any, *replies: Any, **others: Any) -> dict[str, Any]:
    return {"text": text, "role": "prompter", "replies": list(replies), **others}


def reply(text: Any, rank: Any = None, *replies: Any, **others: Any) -> dict[str, Any]:
    return {"text": text, "role": "assistant", "rank": rank, "replies": list(replies), **others}


def read(*roots: Any, rules: TextRules = RULES) -> Parsed:
    return read_as("trees", *({"prompt": root} for root in roots), rules=rules)


def pairs(parsed: Parsed) -> list[tuple[str, str]]:
    return [pair[:2] for example in parsed.examples for pair in example.pairs]


def test_every_two_siblings_of_unequal_rank_give_a_pair_better_first() -> None:
    parsed = read(user("p", reply("c", 2), reply("a", 0), reply("b", 1)))
    assert pairs(parsed) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert parsed.examples[0].completions == ("a",)


def test_equal_ranks_and_missing_ranks_give_no_pair() -> None:
    parsed = read(user("p", reply("a", 1), reply("b", 1), reply("c"), {"text": "d", "role": "assistant"}))
    assert pairs(parsed) == []
    assert parsed.replies_unranked == 2
    assert parsed.examples[0].completions == ("a",)


def test_the_only_reply_is_a_demonstration_and_several_unranked_ones_are_none() -> None:
    parsed = read(user("p", reply("a")), user("q", reply("b"), reply("c")))
    assert [example.completions for example in parsed.examples] == [("a",), ()]


def test_a_deeper_pair_carries_the_conversation_before_it() -> None:
    parsed = read(user("p", reply("a", 0, user("q", reply("x", 1), reply("y", 0))), reply("b", 1)))
    assert [len(example.prompt) for example in parsed.examples] == [1, 3]
    assert parsed.examples[1].prompt == [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
    ]
    assert pairs(parsed) == [("a", "b"), ("y", "x")]


def test_a_user_message_without_replies_is_a_prompt() -> None:
    parsed = read(user("p", reply("a", 0, user("thanks"))))
    assert [example.prompt[-1] for example in parsed.examples if isinstance(example.prompt, list)] == [
        {"role": "user", "content": "p"},
        {"role": "user", "content": "thanks"},
    ]


def test_a_refused_message_takes_those_below_it_along_and_each_is_reported() -> None:
    parsed = read(user("p", reply("", 0, user("q", reply("x", 0), reply("y", 1))), reply("b", 1), reply("c", 2)))
    assert pairs(parsed) == [("b", "c")]
    assert [(r.reason, r.origin.column) for r in parsed.refusals] == [
        ("empty", "prompt.replies[0].text"),
        ("under_refused_message", "prompt.replies[0].replies[0]"),
        ("under_refused_message", "prompt.replies[0].replies[0].replies[0]"),
        ("under_refused_message", "prompt.replies[0].replies[0].replies[1]"),
    ]
    assert parsed.refusals[0].origin.original == {"text": "", "role": "assistant", "rank": 0}
    assert parsed.rows_read == 7


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (reply(True, 0), "wrong_type"),
        (reply("x", True), "rank"),
        (reply("x", "first"), "rank"),
        (reply("x", 0.5), "rank"),
        (reply("x", float("nan")), "rank"),
        (reply("x", 0, deleted=True), "deleted"),
        (reply("x", 0) | {"role": "robot"}, "role"),
        (reply("x", 0) | {"replies": "none"}, "wrong_type"),
        (reply("x" * 501, 0), "response_too_long"),
        ("not a message", "wrong_type"),
        ({"role": "assistant"}, "missing_column"),
        (user("x" * 1001), "prompt_too_long"),
    ],
)
def test_a_bad_message_is_refused_and_its_siblings_stay(bad: Any, reason: str) -> None:
    parsed = read(user("p", reply("a", 1), bad, reply("b", 2)))
    assert [r.reason for r in parsed.refusals] == [reason]
    assert pairs(parsed) == [("a", "b")]


def test_siblings_of_the_same_text_count_once_with_their_best_rank() -> None:
    parsed = read(user("p", reply("a a\n", 2), reply("a a", 0), reply("b", 1)))
    assert pairs(parsed) == [("a a", "b")]
    assert [(r.reason, r.origin.column) for r in parsed.refusals] == [("identical_replies", "prompt.replies[0].text")]


def test_a_conversation_longer_than_the_limit_is_refused_with_all_that_follows() -> None:
    parsed = read(user("p" * 6, reply("r", 0, user("q" * 4, reply("s", 0)))), rules=TextRules(10, 10, ()))
    assert [r.reason for r in parsed.refusals] == ["prompt_too_long", "under_refused_message"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"other": 1}, "missing_column"),
        ({"prompt": None}, "missing_column"),
        ("text", "wrong_type"),
        (None, "wrong_type"),
    ],
)
def test_a_row_without_a_tree_is_refused(row: Any, reason: str) -> None:
    parsed = read_as("trees", row)
    assert [r.reason for r in parsed.refusals] == [reason]
    assert parsed.refusals[0].origin.original == row
    assert parsed.rows_read == 1


def test_a_tree_of_any_depth_is_read() -> None:
    depth = 3000
    tree = user("u")
    for _ in range(depth):
        tree = user("u", reply("a", 0, tree), reply("b", 1))
    parsed = read(tree, rules=TextRules(100, 100, ()))
    assert parsed.rows_read == 3 * depth + 1
    assert len(parsed.examples) == 50  # 50 user and 49 assistant letters fit in 100 characters
    assert Counter(r.reason for r in parsed.refusals)["prompt_too_long"] == 1


def test_the_open_assistant_trees_give_the_known_number_of_pairs() -> None:
    rows = map(json.loads, OASST.read_text(encoding="utf-8").strip().split("\n"))
    parsed = read_as("trees", *rows, rules=TextRules(10**6, 10**6, ()))
    assert (parsed.trees, parsed.rows_read, len(pairs(parsed)), parsed.refusals) == (95, 1145, 732, [])
    assert parsed.replies_unranked == 46
