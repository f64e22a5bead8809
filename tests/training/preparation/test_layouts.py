"""Files as people publish them: each is recognised, and gives the examples that it stands for."""

import json
from typing import Any, get_args

import pytest

from config.errors import DataError
from config.sections.data import Format, Vote
from tests.support.parsed_rows import read, read_as
from training.preparation.columns import NoLayout
from training.preparation.layouts import FORMATS, LAYOUTS, PYTHON
from training.preparation.winners import CONVENTIONS

USER = {"role": "user", "content": "Hello?"}
SYSTEM = {"role": "system", "content": "Be kind."}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hi there.", "What."))
HH = "\n\nHuman: Hello?\n\nAssistant: Yes?\n\nHuman: Help me.\n\nAssistant: "
REPLIES = {"response1": "x", "response2": "y"}


def pairs(*rows: Any, **options: Any) -> list[tuple[Any, str, str]]:
    """(prompt, chosen, rejected) of rows that are all read."""
    _, parsed = read(*rows, **options)
    assert [f"{refusal.reason} {refusal.detail}" for refusal in parsed.refusals] == []
    return [(example.prompt, *pair[:2]) for example in parsed.examples for pair in example.pairs]


def reasons(*rows: Any, form: str = "pairs", **columns: str) -> list[tuple[int, str]]:
    parsed = read_as(form, *rows, **columns)
    return [(refusal.origin.number, refusal.reason) for refusal in parsed.refusals]


def test_params_can_name_every_layout_and_every_convention() -> None:
    assert set(get_args(Format)) == FORMATS.keys() - {PYTHON}
    assert {layout.name for layout in LAYOUTS} <= PUBLISHED.keys()
    assert get_args(Vote) == CONVENTIONS


PUBLISHED: dict[str, tuple[list[Any], list[tuple[Any, str, str]]]] = {
    "PKU-SafeRLHF": (
        [
            {"prompt": "p", "response_0": "x", "response_1": "y", "better_response_id": 0,
             "safer_response_id": 1},
            {"prompt": "q", "response_0": "x", "response_1": "y", "better_response_id": 1,
             "safer_response_id": 0},
        ],
        [("p", "x", "y"), ("q", "y", "x")],
    ),
    "SHP": (
        [
            {"history": "p", "human_ref_A": "x", "human_ref_B": "y", "labels": 1, "score_A": 9},
            {"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": 0, "score_A": 1},
        ],
        [("p", "x", "y"), ("q", "y", "x")],
    ),
    "Chatbot Arena": (
        [{"model_a": "m", "model_b": "n", "winner": winner,
          "conversation_a": [USER, GOOD], "conversation_b": [USER, BAD]}
         for winner in ("model_b", "tie (bothbad)", "model_a")],
        [([USER], "What.", "Hi there."), ([USER], "Hi there.", "What.")],
    ),
    "Chatbot Arena, as a table": (
        [{"id": 1, "prompt": '["Hello?"]', "response_a": '["Hi there."]', "response_b": '["What."]',
          "winner_model_a": a, "winner_model_b": b, "winner_tie": tie}
         for a, b, tie in (("1", "0", "0"), ("0", "1", "0"), ("0", "0", "1"))],
        [([USER], "Hi there.", "What."), ([USER], "What.", "Hi there.")],
    ),
    "HelpSteer3": (
        [{"context": [USER], "response1": "x", "response2": "y", "overall_preference": strength,
          "individual_preference": [], "domain": "d"} for strength in (-2, 3, 0)],
        [([USER], "x", "y"), ([USER], "y", "x")],
    ),
    "HelpSteer2, preferences": (
        [{"prompt": "p", "response_1": "x", "response_2": "y", "preference_strength": strength}
         for strength in (1, -1)],
        [("p", "y", "x"), ("p", "x", "y")],
    ),
    "HelpSteer2": (
        [{"prompt": prompt, "response": text, "helpfulness": score, "verbosity": 1}
         for prompt, text, score in (("p", "x", 1), ("p", "y", 4), ("q", "z", 0))],
        [("p", "y", "x")],
    ),
    "UltraFeedback": (
        [{"source": "s", "instruction": "p", "models": [], "completions": [
            {"model": "m", "response": text, "overall_score": score, "annotations": {}}
            for text, score in (("x", 5.0), ("y", 8.5), ("z", 5.0))]}],
        [("p", "y", "x"), ("p", "y", "z")],
    ),
    "Nectar": (
        [{"prompt": "\n\nHuman: Hello?\n\nAssistant: ", "turns": 1, "num_responses": 2,
          "answers": [{"answer": "x", "model": "m", "rank": 2.0},
                      {"answer": "y", "model": "n", "rank": 1.0}]}],
        [([USER], "y", "x")],
    ),
    "ms-swift": (
        [{"messages": [SYSTEM, USER, GOOD], "rejected_response": "What."}],
        [([SYSTEM, USER], "Hi there.", "What.")],
    ),
    "ms-swift, two conversations": (
        [{"messages": [USER, GOOD], "rejected_messages": [USER, BAD]}],
        [([USER], "Hi there.", "What.")],
    ),
    "LLaMA-Factory's ranking": (
        [{"instruction": "p", "input": "now", "output": ["x", "y"], "system": "Be kind."}],
        [([SYSTEM, {"role": "user", "content": "p\n\nnow"}], "x", "y")],
    ),
    "TRL, unpaired": (
        [{"prompt": "p", "completion": text, "label": label}
         for text, label in (("x", True), ("y", False), ("z", False))],
        [("p", "x", "y"), ("p", "x", "z")],
    ),
    "OpenAssistant, a message a row": (
        [
            {"message_id": identifier, "parent_id": parent, "text": said, "role": role, "rank": rank}
            for identifier, parent, said, role, rank in (
                ("1", None, "Hello?", "prompter", None),
                ("2", "1", "What.", "assistant", 1.0),
                ("3", "1", "Hi there.", "assistant", 0.0),
            )
        ],
        [([USER], "Hi there.", "What.")],
    ),
    "ranked": (
        [{"prompt": "p", "responses": ["x", "y"], "scores": [1, 2.5]}], [("p", "y", "x")],
    ),
    "trees": (
        [{"prompt": {"text": "Hello?", "role": "prompter", "replies": [
            {"text": "What.", "role": "assistant", "rank": 1, "replies": []},
            {"text": "Hi there.", "role": "assistant", "rank": 0, "replies": []}]}}],
        [([USER], "Hi there.", "What.")],
    ),
    "votes": (
        [{"prompt": "p", **REPLIES, "annotator1": 1, "annotator2": 0, "annotator3": 1}],
        [("p", "x", "y")],
    ),
    "pairs": ([{"prompt": "p", "chosen": "x", "rejected": "y"}], [("p", "x", "y")]),
    "ratings": ([{"prompt": "p", "reply": "x", "thumbs": "up"}], []),
    "instructions": ([{"prompt": "p", "completion": "x"}], []),
    "prompts": ([{"prompt": "p"}, "q"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layout_is_recognised_and_its_better_reply_is_the_chosen_one(name: str) -> None:
    rows, expected = PUBLISHED[name]
    assert pairs(*rows) == expected
    assert read(*rows)[0] == name


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"chosen": f"{HH}Gladly.", "rejected": f"{HH}No."},
            ([USER, {**GOOD, "content": "Yes?"}, {**USER, "content": "Help me."}],
             "Gladly.", "No."),
        ),
        ({"chosen": f"Rules.{HH}Gladly.", "rejected": f"Rules.{HH}No."},
         ([{"role": "system", "content": "Rules."}, USER, {**GOOD, "content": "Yes?"},
           {**USER, "content": "Help me."}], "Gladly.", "No.")),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ([USER], "Hi there.", "What.")),
        ({"prompt": "Hello?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
         ("Hello?", "Hi there.", "What.")),
        ({"prompt": "Hello?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
         ([SYSTEM, USER], "Hi there.", "What.")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ([USER], "Hi there.", "What.")),
        ({"prompt": [USER], "chosen": {"from": "gpt", "value": "Hi there."}, "rejected": BAD},
         ([USER], "Hi there.", "What.")),
        ({"conversations": [{"from": "human", "value": "Hello?"}],
          "chosen": {"from": "gpt", "value": "Hi there."},
          "rejected": {"from": "gpt", "value": "What."}}, ([USER], "Hi there.", "What.")),
        ({"system": "Be kind.", "question": "Hello?", "chosen": "Hi there.", "rejected": "What."},
         ([SYSTEM, USER], "Hi there.", "What.")),
        ({"instruction": "p", "input": "now", "chosen": "x", "rejected": "y",
          "history": [["Hello?", "Hi there."]]},
         ([USER, GOOD, {"role": "user", "content": "p\n\nnow"}], "x", "y")),
        ({"prompt": "Hello?", "chosen": repr([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
         ("Hello?", "Hi there.", "What.")),
        ({"prompt": "p", "chosen": "if x:\n    y", "rejected": "if x:\n        y"},
         ("p", "if x:\n    y", "if x:\n        y")),
    ],
)  # fmt: skip
def test_pairs_in_every_spelling(row: Any, expected: Any) -> None:
    assert pairs(row) == [expected]


def test_several_rejected_replies_are_each_worse_than_the_chosen_one() -> None:
    assert pairs({"prompt": "p", "chosen": "a", "rejected": ["b", "c"]}) == [("p", "a", "b"), ("p", "a", "c")]


def test_each_refused_pair_has_its_own_reason() -> None:
    other = [{**USER, "content": "Other?"}, BAD]
    rows = [
        {"chosen": [USER, GOOD], "rejected": other},
        {"chosen": "Hi there.", "rejected": "What."},
        {"chosen": f"{HH}Gladly.\n\nHuman: Thanks.", "rejected": f"{HH}No."},
        {"chosen": HH, "rejected": f"{HH}No."},
        {"chosen": f"{HH}No.", "rejected": f"{HH}No."},
        {"prompt": "Bye?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": "[{'role': 'user'\n {'role'", "rejected": [USER, BAD]},
        {"chosen": [GOOD], "rejected": [BAD]},
    ]
    assert reasons(*rows) == [
        (1, "conversations_part"),
        (2, "no_prompt"),
        (3, "ends_with_user"),
        (4, "empty"),
        (5, "identical_replies"),
        (6, "other_prompt"),
        (7, "spelt_list"),
        (8, "no_prompt"),
    ]


def test_each_refused_conversation_has_its_own_reason() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    image = {"type": "image_url", "image_url": {}}
    rows: list[Any] = [
        [USER, call],
        [USER, call, {"role": "tool", "content": "5"}, GOOD],
        [USER, {**GOOD, "content": None}],
        [{**USER, "content": [{"type": "text", "text": "Hello?"}, image]}, GOOD],
        [USER, {**GOOD, "role": "narrator"}],
        [USER],
        [],
        None,
        [USER, "Hi there."],
        [{"speaker": "user", "content": "Hello?"}, GOOD],
        [GOOD],
    ]
    result = reasons(*({"messages": row} for row in rows), form="instructions")
    assert [why for _, why in result] == [
        "tool_turn", "tool_turn", "wrong_type", "not_text", "role", "ends_with_user", "empty",
        "wrong_type", "wrong_type", "missing_column", "no_prompt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "messages",
    [
        [USER, GOOD],
        [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi there."}],
        [{**USER, "role": "Human"}, {**GOOD, "role": "BOT"}],
        [{**USER, "role": "prompter"}, {**GOOD, "role": "model"}],
        [{**USER, "content": [{"type": "text", "text": "Hello?"}]}, GOOD],
        json.dumps([USER, GOOD]),
    ],
)
def test_messages_in_every_harmless_spelling_are_a_demonstration(messages: Any) -> None:
    for name in ("messages", "conversations"):
        form, parsed = read({name: messages})
        assert form == "instructions"
        [example] = parsed.examples
        assert (example.prompt, example.completions) == ([USER], ("Hi there.",))


@pytest.mark.parametrize(
    "more",
    [
        {"responses": ["b", "a", "c"], "ranks": [1, 0, 2]},
        {"responses": ["b", "a", "c"], "scores": [5, 9.5, 1]},
        {"responses": [{"text": t, "rank": r} for t, r in (("b", 2), ("a", 1), ("c", 3))]},
        {"completions": [{"response": r, "score": s} for r, s in (("b", 2), ("a", 3), ("c", 1))]},
        {"answers": '["b", "a", "c"]', "rank": "[1, 0, 2]"},
    ],
)
def test_ranked_replies_give_every_pair_of_unequal_rank(more: Any) -> None:
    form, parsed = read({"prompt": "Hello?", **more})
    [example] = parsed.examples
    assert form == "ranked"
    assert {pair[:2] for pair in example.pairs} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert example.completions == ("a",)


@pytest.mark.parametrize("score", [float("nan"), None, "high"])
def test_a_score_that_orders_nothing_refuses_its_row(score: Any) -> None:
    rows = [{"prompt": "p", "responses": ["a", "b"], "scores": [1, item]} for item in (2, score)]
    assert reasons(*rows, form="ranked") == [(2, "not_a_number")]


def test_undesirable_replies_are_no_demonstrations() -> None:
    _, parsed = read(
        {"prompt": "p", "completion": "x", "label": True}, {"prompt": "q", "completion": "y", "label": False}
    )
    assert [(example.prompt, example.completions) for example in parsed.examples] == [("p", ("x",)), ("q", ())]


def test_conversations_of_an_arena_that_part_before_the_last_reply_are_refused() -> None:
    longer = [[USER, first, USER, last] for first, last in ((GOOD, BAD), (BAD, GOOD))]
    row = {"winner": "model_a", "conversation_a": longer[0], "conversation_b": longer[1]}
    columns = {"response1": "conversation_a", "response2": "conversation_b"}
    assert reasons(row, form="votes", annotators="winner", **columns) == [(1, "conversations_part")]


# ---------------------------------------------------------------- labels are never guessed


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        (["model_a", "model_b"], "xy"), (["A", "B"], "xy"), (["left", "right"], "xy"),
        (["response_a", "response_b"], "xy"), (["y", "x"], "yx"), ([1, 2], "xy"),
        (["1", "2"], "xy"), (["response 1", "response 2"], "xy"), (["model_0", "model_1"], "xy"),
        ([2, 2], "yy"), (["tie", "b"], "y"), (["Tie (bothbad)", "a"], "x"), (["A", 0], "x"),
    ],
)  # fmt: skip
def test_values_that_say_who_won_are_read(values: list[Any], chosen: str) -> None:
    rows = [{"prompt": "p", "response_a": "x", "response_b": "y", "winner": v} for v in values]
    assert "".join(pair for _, pair, _ in pairs(*rows)) == chosen
    named = [{**row, "verdict": row.pop("winner")} for row in rows]
    assert "".join(pair for _, pair, _ in pairs(*named, vote="verdict")) == chosen


@pytest.mark.parametrize(
    ("values", "readings"),
    [
        ([0, 1], {"index0": "xy", "index1": "x"}),
        (["1", "0"], {"index0": "yx", "index1": "x"}),
        ([1, 1], {"index0": "yy", "index1": "xx"}),
        ([True, False], {"index0": "yx"}),
        ([0, 1, 2], {"index0": "xy", "index1": "xy"}),
        ([-1, 1], {"negative-first": "xy", "positive-first": "yx"}),
        ([-3, 0, 2], {"negative-first": "xy", "positive-first": "yx"}),
    ],
)
def test_values_that_can_be_read_in_two_ways_are_read_only_by_a_named_one(
    values: list[Any], readings: dict[str, str]
) -> None:
    rows = [{"prompt": "p", **REPLIES, "winner": value} for value in values]
    with pytest.raises(DataError, match="can be read in two ways") as refused:
        read(*rows)
    for way, chosen in readings.items():
        assert f"--vote {way}: " in str(refused.value)
        parsed = read_as("votes", *rows, convention=way, vote="winner")
        assert "".join(p.chosen for example in parsed.examples for p in example.pairs) == chosen


def test_what_rlhf_label_writes_means_what_it_writes() -> None:
    rows = [{"prompt": "p", **REPLIES, "annotator": who, "vote": said}
            for who, said in (("ada", 0), ("bob", 1), ("cy", 1))]  # fmt: skip
    assert pairs(*rows) == [("p", "x", "y")]
    columns = [{"prompt": "p", **REPLIES, "annotator1": 1, "annotator2": 0, "annotator3": 1}]
    assert pairs(*columns) == [("p", "x", "y")]


def test_one_vote_a_row_counts_with_those_on_the_same_pair_whatever_the_columns() -> None:
    rows = [{"prompt": "p", **REPLIES, "rater": who, "verdict": said}
            for who, said in (("ada", "A"), ("bob", "B"), ("cy", "B"))]  # fmt: skip
    assert pairs(*rows, annotator="rater", vote="verdict") == [("p", "y", "x")]


def test_a_vote_that_is_none_is_refused_alone() -> None:
    rows = [{"prompt": "p", **REPLIES, "winner": said} for said in ("A", "perhaps", None, "B")]
    _, parsed = read(*rows)
    assert [(refusal.origin.number, refusal.reason) for refusal in parsed.refusals] == [
        (2, "not_a_vote"),
        (3, "not_a_vote"),
    ]
    assert parsed.refusals[0].detail == "'perhaps' is no vote (words)"


@pytest.mark.parametrize(
    "row",
    [
        {"winner": "left", "left": "x", "right": "y", "id": 3},
        {"question": "p", "best_answer": "x", "correct_answers": ["x"], "incorrect_answers": ["y"]},
        {"instruction": "p", "prediction_1": "x", "prediction_2": "y", "preference": 1},
        {"prompt": "p", "score": 3},
        {"prompt": "p", "answer_0": "x", "answer_1": "y"},
        {"prompt": "p", "response": "x", "rejected_reply": "y", "rank": 1},
        {"fields": {"prompt": "p"}, "responses": {"preference": []}},
        {"data": {"prompt": "p"}, "annotations": []},
    ],
)
def test_preferences_in_no_known_layout_are_never_left_unread(row: Any) -> None:
    with pytest.raises(NoLayout, match="rlhf init NAME --data") as refused:
        read(row)
    assert refused.value.first == row


@pytest.mark.parametrize("prompt", [8, "8", "q-17", "5f3a", 1.5])
def test_ids_are_no_prompts(prompt: Any) -> None:
    with pytest.raises(DataError, match="numbers or ids"):
        read({"prompt": prompt, "completion": "x"}, {"prompt": prompt, "completion": "y"})


# ---------------------------------------------------------------- doubts


def test_scores_that_contradict_the_labels_are_counted() -> None:
    rows = [{"prompt": "p", "chosen": "x", "rejected": "y", "score_chosen": score,
             "score_rejected": 2.0} for score in (3.0, 1.0, 2.0)]  # fmt: skip
    assert read(*rows)[1].warnings == (
        "score_chosen is below score_rejected in 1 of 3 rows (first: line 2): the labels contradict the scores",
    )


@pytest.mark.parametrize(
    "prompt", ["<|im_start|>user\nHello?<|im_end|>", "[INST] Hello? [/INST]", "Human: Hello?\n\nAssistant:"]
)
def test_a_prompt_that_is_rendered_already_is_warned_of(prompt: str) -> None:
    [warning] = read({"prompt": prompt, "completion": "x"}, {"prompt": "p", "completion": "y"})[1].warnings
    assert warning.startswith("1 of 2 prompts look like a transcript or a rendered template")


def test_a_side_that_never_wins_is_warned_of() -> None:
    rows = [{"prompt": f"p {i}", **REPLIES, "winner": "A"} for i in range(20)]
    [warning] = read(*rows)[1].warnings
    assert warning.startswith("the second reply never wins in 20 votes")
    assert read(*rows[:19])[1].warnings == ()
    assert read(*rows, {**rows[0], "winner": "B"})[1].warnings == ()
