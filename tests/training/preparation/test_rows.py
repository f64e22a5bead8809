import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.errors import DataError
from training.modeling.batching import shared_length
from training.modeling.packing import pack_pairs
from training.modeling.tokenizer import encode_prompt, encode_response, trained_tokenizer
from training.preparation.cleaning import Origin, Refusal
from training.preparation.formats import Example, Pair
from training.preparation.rows import (
    Row,
    canonical_row,
    make_dataset,
    refuse_empty_splits,
    with_room,
    write_prepared,
)
from training.preparation.splits import SPLITS, split_of

TOKENIZER = trained_tokenizer(["hello there , how are you ?", "we are well ."], 300)
ORIGIN = Origin("rows.jsonl", "line", 1, "prompt", None)


def example(prompt: str, chosen: str = "a", rejected: str = "b") -> Example:
    return Example(ORIGIN, prompt, (Pair(chosen, rejected, None),), (chosen,))


def dataset(use: str, *examples: Example) -> dict[str, list[Row]]:
    return make_dataset(
        use, examples, (0.5, 0.0, 0.0), TOKENIZER, with_room(TOKENIZER, examples, 10**6)[0]
    )


def contents(rows: dict[str, list[Row]]) -> list[dict]:
    return [row.content for split in SPLITS for row in rows[split]]


def test_exact_duplicates_are_dropped_and_contradictions_kept() -> None:
    rows = dataset("preference", example("p"), example("p", "a", "b"), example("p", "b", "a"))
    assert contents(rows) == [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "b", "rejected": "a"},
    ]


def test_each_use_has_its_own_columns() -> None:
    assert contents(dataset("sft", example("p"))) == [{"prompt": "p", "completion": "a"}]
    assert contents(dataset("prompts", example("p"), example("p", "c"))) == [{"prompt": "p"}]


def test_one_conversation_makes_all_rows_of_a_dataset_conversational() -> None:
    talk = Example(ORIGIN, [{"role": "user", "content": "q"}], (), ("c",))
    assert sorted(contents(dataset("sft", example("p"), talk)), key=str) == [
        {
            "prompt": [{"role": "user", "content": "p"}],
            "completion": [{"role": "assistant", "content": "a"}],
        },
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "c"}],
        },
    ]
    assert canonical_row("p", {"completion": "a"}, conversational=False) == {
        "prompt": "p",
        "completion": "a",
    }


def test_sequences_are_as_long_as_the_stages_will_see_them() -> None:
    (row,) = [
        row
        for rows in dataset("preference", example("how are you ?", "we are well .", "no")).values()
        for row in rows
    ]
    prompt = len(encode_prompt(TOKENIZER, "how are you ?"))
    assert row.sequence_tokens == tuple(
        prompt + len(encode_response(TOKENIZER, text)) for text in ("we are well .", "no")
    )
    (row,) = [row for rows in dataset("prompts", example("how are you ?")).values() for row in rows]
    assert row.sequence_tokens == (prompt,)
    assert row.pair_tokens is None


def test_a_pair_is_as_long_as_a_stage_reads_it_what_both_begin_with_once() -> None:
    replies = ("we are well .", "we are not .")
    rows = dataset("preference", example("how are you ?", *replies))
    (row,) = [row for split in rows.values() for row in split]
    prompt = encode_prompt(TOKENIZER, "how are you ?")
    chosen, rejected = (prompt + encode_response(TOKENIZER, text) for text in replies)
    packed, _ = pack_pairs([(chosen, rejected)])
    assert len(prompt) < shared_length(chosen, rejected)
    assert row.pair_tokens == len(packed.ids_N) < sum(row.sequence_tokens) - len(prompt)


@given(st.lists(st.sampled_from([f"prompt {i}" for i in range(30)]), min_size=1), st.data())
def test_no_prompt_is_in_two_splits_and_adding_rows_moves_none(
    prompts: list[str], data: st.DataObject
) -> None:
    few = [example(prompt, f"reply {i}") for i, prompt in enumerate(prompts)]
    added = data.draw(st.lists(st.sampled_from([f"prompt {i}" for i in range(60)])))
    more = [*few, *(example(prompt, f"other {i}") for i, prompt in enumerate(added))]
    before = {use: dataset(use, *few) for use in ("sft", "preference", "prompts")}
    after = {use: dataset(use, *more) for use in before}
    in_split = {
        split: {row.content["prompt"] for rows in after.values() for row in rows[split]}
        for split in SPLITS
    }
    assert not in_split["train"] & in_split["test"]
    for use, splits in before.items():
        for split, rows in splits.items():
            assert after[use][split][: len(rows)] == rows


def test_a_prompt_is_crowded_out_when_not_one_token_is_left_for_the_reply() -> None:
    crowded = example("hello there")
    ids = encode_prompt(TOKENIZER, crowded.prompt)
    assert with_room(TOKENIZER, [crowded], len(ids) + 1) == ({crowded: ids}, [])
    kept, [refusal] = with_room(TOKENIZER, [crowded], len(ids))
    assert (kept, refusal.reason, refusal.origin) == ({}, "prompt_fills_context", ORIGIN)


def test_what_the_chat_template_refuses_is_refused_with_its_words() -> None:
    tokenizer = trained_tokenizer(["hello there"], 300)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn') }}{% endif %}x"
    )
    user = {"role": "user", "content": "p"}
    fine = Example(ORIGIN, [user])
    other = Example(Origin("rows.jsonl", "line", 2, "", None), [{**user, "role": "system"}, user])
    kept, [refusal] = with_room(tokenizer, [fine, other], 100)
    assert list(kept) == [fine]
    assert (refusal.reason, refusal.origin.number) == ("chat_template", 2)
    assert refusal.detail == "the chat template says: No system turn."


def test_an_empty_split_is_refused_by_name() -> None:
    rows = dataset("sft", example("p"))
    with pytest.raises(
        DataError, match=f"sft/{'train' if split_of('p', 0.5) == 'test' else 'test'}"
    ):
        refuse_empty_splits({"sft": rows}, 0.5)


def test_prepared_data_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "data/prepared"
    target.mkdir(parents=True)
    (target / "old").write_text("x")
    write_prepared(
        target, {"sft": dataset("sft", example("caf\u00e9"))}, [Refusal("empty", "why", ORIGIN)]
    )
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.jsonl")) == [
        "quarantine.jsonl", "sft/test.jsonl", "sft/train.jsonl",
    ]  # fmt: skip
    assert not (target / "old").exists()
    assert [row for split in SPLITS for row in jsonl.plain(target / f"sft/{split}.jsonl")] == [
        {"prompt": "caf\u00e9", "completion": "a"}
    ]
    assert json.loads((target / "quarantine.jsonl").read_text())["reason"] == "empty"
