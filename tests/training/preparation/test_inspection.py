import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import DataError, ParamsError
from config.load import load
from tests.conftest import ROOT
from training.preparation.inspection import Inspection, inspect

PARAMS = load(ROOT / "recipes" / "demo.yaml", ["data.test_fraction=0.3"])
PAIR = {"question": "Where is my {}?", "preferred": "On its way, {}.", "rejected": "No idea."}


def looked_at(folder: Path, rows: list[Any] | str, name: str = "rows.jsonl", form: str | None = None) -> Inspection:
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    (folder / name).write_text(text, encoding="utf-8")
    return inspect(name, folder, PARAMS, form, {})


def pairs(count: int) -> list[dict[str, str]]:
    return [{name: text.format(i) for name, text in PAIR.items()} for i in range(count)]


def test_pairs_are_known_by_the_names_that_people_give_them(tmp_path: Path) -> None:
    result = looked_at(tmp_path, [*pairs(4), pairs(1)[0]])
    assert result.format == "pairs"
    assert result.source == {
        "kind": "file",
        "path": "rows.jsonl",
        "format": "pairs",
        "columns": {"prompt": "question", "chosen": "preferred"},
    }
    assert (result.rows, result.pairs, result.prompts, result.duplicates) == (5, 5, 4, 1)
    assert result.samples[1][0].count("Where is my 1?") == 1
    assert result.samples[1][1] == "On its way, 1."
    assert result.chosen_longer == 1.0
    assert result.words["reply"] == {"mean": 3.0, "p95": 4.0, "max": 4}
    assert result.baselines == {}


def test_what_stands_in_data_source_is_read_by_the_data_stage_in_the_same_way(tmp_path: Path) -> None:
    result = looked_at(tmp_path, pairs(100))
    again = inspect(result.file, tmp_path, PARAMS, result.source["format"], result.source["columns"])
    assert again == result
    assert result.baselines["longer_wins"][0] == 1.0
    assert 0 < result.test_prompts < 100


@pytest.mark.parametrize(
    ("row", "form", "columns"),
    [
        (
            {"instruction": "a", "input": "b", "response1": "c", "response2": "d", "label_1": 2},
            "votes",
            {"prompt": "instruction", "annotators": "label_1", "input": "input"},
        ),
        ({"prompt": "a", "response1": "c", "response2": "d", "annotator": "x", "vote": 2}, "votes", {}),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "instructions",
            {"prompt": "instruction", "completion": "output", "input": "input"},
        ),
        ({"Question": "a"}, "prompts", {"prompt": "Question"}),
        (
            {"question": "a", "answer": "b", "feedback": "👍"},
            "ratings",
            {"prompt": "question", "completion": "answer", "label": "feedback"},
        ),
        (
            {"prompt": "a", "response": "b", "thumbs_up": "0"},
            "ratings",
            {"completion": "response", "label": "thumbs_up"},
        ),
        # 1 may as well say that a reply is toxic
        ({"prompt": "a", "completion": "b", "label": 1}, "rated", {"score": "label"}),
        ({"prompt": "a", "response": "b", "label": 1}, "instructions", {"completion": "response"}),
        ({"prompt": "a", "completion": "b", "label": True}, "ratings", {}),
        ("a", "prompts", {}),
        ({"prompt": {"text": "a", "role": "prompter", "replies": []}, "id": 3}, "trees", {}),
    ],
)
def test_formats(tmp_path: Path, row: Any, form: str, columns: dict[str, str]) -> None:
    result = looked_at(tmp_path, [row])
    assert (result.format, result.columns) == (form, columns)
    assert result.refused == {}


def test_ratings_are_counted_and_a_value_that_says_neither_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {i}", "completion": f"r {i}", "label": ["up", "down", "down"][i % 3]} for i in range(9)]
    result = looked_at(tmp_path, [*rows, rows[0], {**rows[1], "label": "meh"}], form="ratings")
    assert (result.good, result.bad, result.pairs, result.demonstrations) == (4, 6, 0, 4)
    assert result.duplicates == 1
    assert result.refused["not_a_rating"]["rows"] == 1
    assert result.source["format"] == "ratings"
    assert [reply for _, reply in result.samples] == ["r 0", "r 1", "r 2"]


def test_replies_to_one_prompt_are_pairs_and_to_each_its_own_ratings(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {i // 2}", "completion": f"r {i}", "label": i % 2 == 0} for i in range(8)]
    assert (looked_at(tmp_path, rows).format, looked_at(tmp_path, rows[::2]).format) == ("rated", "ratings")


def test_refusals_stand_with_their_first_place(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*pairs(3)]
    rows[1]["preferred"] = " "
    rows[2]["preferred"] = ""
    result = looked_at(tmp_path, rows)
    assert result.refused == {"empty": {"rows": 2, "first": "rows.jsonl line 2, preferred", "detail": "empty text"}}
    assert result.pairs == 1


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    result = looked_at(tmp_path, [row | {"id": 1} for row in pairs(2)])
    assert result.unread == ["id"]


@pytest.mark.parametrize(("mark", "named"), [(";", ";"), ("\t", "\t"), (",", ","), ("|", "|")])
def test_the_delimiter_of_a_csv_file_is_found(tmp_path: Path, mark: str, named: str) -> None:
    lines = [mark.join(("prompt", "chosen", "rejected")), mark.join(("a", '"b, c; d"', "e"))]
    result = looked_at(tmp_path, "\n".join(lines), "rows.csv")
    assert (result.delimiter, result.format, result.samples[0][1]) == (named, "pairs", "b, c; d")


def test_a_file_that_fits_no_format_is_told_what_they_need(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its columns \(left, right\) are in no known"):
        looked_at(tmp_path, [{"left": "a", "right": "b"}])


def test_a_format_that_is_named_and_does_not_fit_is_refused_by_its_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'chosen'"):
        looked_at(tmp_path, [{"prompt": "a", "completion": "b"}], form="pairs")


def test_a_column_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs(1)[0]))
    with pytest.raises(ParamsError, match="choosen"):
        inspect("rows.jsonl", tmp_path, PARAMS, "pairs", {"choosen": "preferred"})
