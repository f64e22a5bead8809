import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.errors import DataError
from config.load import load
from tests.conftest import ROOT
from tests.support.parsed_rows import RULES, table_of
from training.modeling.batching import shared_length
from training.modeling.duplicates import digest, first_occurrences
from training.modeling.packing import pack_pairs
from training.modeling.tokenizer import encode_prompt, encode_response, trained_tokenizer
from training.preparation.cleaning import Origin, Quarantine
from training.preparation.examples import Need
from training.preparation.formats import USES, Example
from training.preparation.layouts import PYTHON
from training.preparation.prepared import Datasets, Passes, refuse_empty_splits, with_room
from training.preparation.splits import SPLITS, split_of
from training.preparation.summary import (
    duplicate_metrics,
    label_balance,
    length_histogram,
    row_counts,
    some_pairs,
    token_lengths,
)

TOKENIZER = trained_tokenizer(["hello there , how are you ?", "we are well ."], 300)
ORIGIN = Origin("rows.jsonl", "line", 1, "prompt", None)
SETTINGS = load(ROOT / "recipes/demo.yaml", ["data.test_fraction=0.5"]).data


def pair(prompt: str, chosen: str = "a", rejected: str = "b") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def written(folder: Path, *rows: Any, room: int = 10**6, **settings: float) -> Datasets:
    """The datasets that rows of our own formats give."""
    passes = Passes(Quarantine(folder / "quarantine.jsonl"), SETTINGS.model_copy(update=settings))
    accepted = passes.read([Need(table_of(*rows), PYTHON, {}, USES)], RULES)
    return passes.write(accepted, TOKENIZER, room)


def contents(datasets: Datasets, use: str) -> list[dict[str, Any]]:
    return [row for split in SPLITS for row in jsonl.plain(datasets.splits[use][split].path)]


def test_exact_duplicates_are_dropped_and_contradictions_kept(tmp_path: Path) -> None:
    rows = [pair("p"), pair("p", "a", "b"), pair("p", "b", "a"), pair("p", "c", "d")]
    datasets = written(tmp_path, *rows)
    assert contents(datasets, "preference") == [rows[0], *rows[2:]]
    assert duplicate_metrics(datasets) == {
        "sft_duplicates": 1,
        "preference_duplicates": 1,
        "ratings_duplicates": 0,
        "prompts_duplicates": 3,
        "contradictory_pairs": 2,
    }


def test_prompts_of_the_judge_are_no_duplicates_of_the_other_datasets(tmp_path: Path) -> None:
    rows = [pair(f"p{i}") for i in range(40)]
    datasets = written(tmp_path, *rows, judge_fraction=0.3)
    assert datasets.splits["preference"]["judge"].rows > 0
    assert datasets.duplicates == dict.fromkeys(USES, 0)


def test_each_use_has_its_own_columns(tmp_path: Path) -> None:
    datasets = written(tmp_path, pair("p"), pair("p", "c"))
    assert contents(datasets, "sft") == [{"prompt": "p", "completion": "a"}, {"prompt": "p", "completion": "c"}]
    assert contents(datasets, "prompts") == [{"prompt": "p"}]


def test_one_conversation_makes_all_rows_conversational(tmp_path: Path) -> None:
    talk = {"prompt": [{"role": "user", "content": "q"}], "completion": "c"}
    assert sorted(contents(written(tmp_path, pair("p"), talk), "sft"), key=str) == [
        {"prompt": [{"role": "user", "content": text}], "completion": [{"role": "assistant", "content": reply}]}
        for text, reply in (("p", "a"), ("q", "c"))
    ]


def test_sequences_are_as_long_as_the_stages_will_see_them(tmp_path: Path) -> None:
    datasets = written(tmp_path, pair("how are you ?", "we are well .", "no"))
    prompt = len(encode_prompt(TOKENIZER, "how are you ?"))
    replies = [len(encode_response(TOKENIZER, text)) for text in ("we are well .", "no")]
    place = split_of("how are you ?", 0.5)
    preference, prompts = (datasets.splits[use][place] for use in ("preference", "prompts"))
    assert preference.sequence_tokens().tolist() == [prompt + reply for reply in replies]
    assert prompts.sequence_tokens().tolist() == [prompt]
    assert not prompts.pair_tokens


def test_a_pair_is_as_long_as_a_stage_reads_it_what_both_begin_with_once(tmp_path: Path) -> None:
    replies = ("we are well .", "we are not .")
    datasets = written(tmp_path, pair("how are you ?", *replies))
    split = datasets.splits["preference"][split_of("how are you ?", 0.5)]
    prompt = encode_prompt(TOKENIZER, "how are you ?")
    chosen, rejected = (prompt + encode_response(TOKENIZER, text) for text in replies)
    packed, _ = pack_pairs([(chosen, rejected)])
    assert len(prompt) < shared_length(chosen, rejected)
    assert list(split.pair_tokens) == [len(packed.ids_N)]
    assert len(packed.ids_N) < split.sequence_tokens().sum() - len(prompt)


@given(st.lists(st.sampled_from([f"prompt {i}" for i in range(30)]), min_size=1), st.data())
def test_no_prompt_is_in_two_splits_and_adding_rows_moves_none(prompts: list[str], data: st.DataObject) -> None:
    few = [pair(prompt, f"reply {i}") for i, prompt in enumerate(prompts)]
    added = data.draw(st.lists(st.sampled_from([f"prompt {i}" for i in range(60)])))
    more = [*few, *(pair(prompt, f"other {i}") for i, prompt in enumerate(added))]

    def splits(*rows: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            datasets = written(Path(folder), *rows)
            return {(use, name): list(jsonl.plain(s.path)) for use, name, s in datasets.items()}

    before, after = splits(*few), splits(*more)
    train, test = (
        {row["prompt"] for (_, name), rows in after.items() for row in rows if name == split} for split in SPLITS
    )
    assert not train & test
    for name, rows in before.items():
        assert after[name][: len(rows)] == rows


def test_a_prompt_is_crowded_out_when_not_one_token_is_left_for_the_reply() -> None:
    crowded = Example(ORIGIN, "hello there")
    ids = encode_prompt(TOKENIZER, crowded.prompt)
    assert with_room(TOKENIZER, [crowded], len(ids) + 1) == ({crowded: ids}, [])
    kept, [refusal] = with_room(TOKENIZER, [crowded], len(ids))
    assert (kept, refusal.reason, refusal.origin) == ({}, "prompt_fills_context", ORIGIN)


def test_what_is_refused_in_the_second_pass_shifts_no_duplicate(tmp_path: Path) -> None:
    rows = [pair("hello there , how are you ?"), pair("p"), pair("p"), pair("q")]
    datasets = written(tmp_path, *rows, room=8)
    assert sorted(row["prompt"] for row in contents(datasets, "sft")) == ["p", "q"]
    [refused] = map(json.loads, (tmp_path / "quarantine.jsonl").read_text().splitlines())
    assert (refused["reason"], refused["number"]) == ("prompt_fills_context", 1)
    assert refused["original"] == rows[0]


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


def test_an_empty_split_is_refused_by_name(tmp_path: Path) -> None:
    datasets = written(tmp_path, pair("p"))
    empty = "train" if split_of("p", 0.5) == "test" else "test"
    with pytest.raises(DataError, match=f"sft/{empty}"):
        refuse_empty_splits(datasets, 0.5)


def test_one_opening_that_fills_a_split_is_named(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"prompt": [*hello, {"role": "user", "content": text}], "completion": "x"} for text in "abcdef"]
    datasets = written(tmp_path, *rows)
    with pytest.raises(DataError, match=r"6 of them begin with 'Hello!', and what begins alike is in one split"):
        refuse_empty_splits(datasets, 0.5)


def test_a_digest_tells_texts_apart_and_where_one_ends() -> None:
    assert digest("a", "b") == digest("a", "b")
    assert len({digest("a", "b"), digest("ab"), digest("", "ab"), digest("b", "a")}) == 4
    assert first_occurrences([3, 1, 3, 2, 1]).tolist() == [True, True, False, True, False]
    assert first_occurrences([]).tolist() == []


# ---------------------------------------------------------------- what is known of the rows


def test_rows_and_unique_prompts_are_counted_per_split(tmp_path: Path) -> None:
    place = split_of("p", 0.5)
    counts = row_counts(written(tmp_path, pair("p"), pair("p", "c"), pair("p", "a", "d")))
    assert counts[f"preference_{place}_rows"] == 3
    assert counts[f"preference_{place}_unique_prompts"] == 1
    assert counts[f"prompts_{place}_rows"] == 1
    assert sum(counts.values()) == 3 + 1 + 2 + 1 + 1 + 1, "chosen replies: a twice, and c"


def test_lengths_are_those_of_every_sequence(tmp_path: Path) -> None:
    replies = [("a", "a a"), ("a a a", "a a a a a")]
    place = split_of("p", 0.5)
    datasets = written(tmp_path, *(pair("p", *texts) for texts in replies))
    prompt = len(encode_prompt(TOKENIZER, "p"))
    tokens = [prompt + len(encode_response(TOKENIZER, text)) for texts in replies for text in texts]
    lengths = token_lengths(datasets)
    assert lengths[f"preference_{place}_tokens_mean"] == pytest.approx(sum(tokens) / 4)
    assert lengths[f"preference_{place}_tokens_p50"] == (sorted(tokens)[1] + sorted(tokens)[2]) / 2
    assert lengths[f"preference_{place}_tokens_max"] == max(tokens)
    assert lengths[f"preference_{place}_pair_tokens_max"] < tokens[2] + tokens[3]
    assert not [name for name in lengths if "prompts" in name and "pair" in name]


def test_the_histogram_counts_every_sequence_once_in_bins_of_one_width(tmp_path: Path) -> None:
    datasets = written(tmp_path, *(pair(f"p{i}", "a " * i + "b") for i in range(40)))
    table = length_histogram(datasets)
    for use, name, split in datasets.items():
        counts = [count for u, n, _, count in table if (u, n) == (use, name)]
        assert sum(counts) == len(split.sequence_tokens())
    edges = sorted({tokens for *_, tokens, _ in table})
    assert len({b - a for a, b in pairwise(edges)}) == 1
    assert len(edges) <= 30


def test_label_balance_counts_the_known_positions_only(tmp_path: Path) -> None:
    votes = [
        {"prompt": f"v{i}", "response1": "a", "response2": "bb", "votes": [vote]} for i, vote in enumerate((1, 2, 2))
    ]
    rows = [pair("p", "aa", "a"), pair("q", "a", "b"), *votes]
    datasets = written(tmp_path, *rows)
    # aa is longer, a is as long as b, and bb is longer in two votes of three
    assert label_balance(datasets) == {"chosen_longer": 3.5 / 5, "chosen_first": 1 / 3}
    (tmp_path / "other").mkdir()
    assert label_balance(written(tmp_path / "other", *rows[:2]))["chosen_first"] is None


def test_of_many_pairs_some_are_taken_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.preparation.summary.MOST_PAIRS", 4)
    datasets = written(tmp_path, *(pair("p", f"a{i}") for i in range(10)))
    place = split_of("p", 0.5)
    chosen = [texts.chosen for texts in some_pairs(datasets.splits["preference"][place])]
    assert chosen == ["a0", "a3", "a6", "a9"]


def test_equal_prompts_with_other_answers_are_two_prompts_of_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "completion": answer} for i in range(6) for answer in ("2", "3", "2")]
    datasets = written(tmp_path, *rows)
    assert contents(datasets, "prompts") != []
    assert [row["row"]["completion"] for row in contents(datasets, "prompts")] == ["2", "3"] * 6
    assert datasets.duplicates["prompts"] == 6
