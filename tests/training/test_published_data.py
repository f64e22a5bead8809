"""Files as they are published: what `rlhf data check` says of them is what the data stage does."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load
from tests.conftest import ROOT
from tests.training.test_data import rows, run
from training.modeling.tokenizer import trained_tokenizer
from training.preparation.inspection import Inspection, inspect

USER, GOOD, BAD = "How is my {} kettle?", "Fine, the {} kettle is here.", "No idea of {}."
SYSTEM = {"role": "system", "content": "Be kind."}


def said(i: int, *texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 3
    return [{"role": r, "content": t.format(i)} for r, t in zip(roles, texts, strict=False)]


def hh(i: int, *texts: str) -> str:
    speakers = ("Human", "Assistant") * 3
    return "".join(f"\n\n{who}: {text.format(i)}" for who, text in zip(speakers, texts, strict=False))


def winner_index(i: int) -> dict[str, Any]:
    replies = [GOOD.format(i), BAD.format(i)]
    first, second = replies if i % 2 else replies[::-1]
    return {"prompt": USER.format(i), "response_0": first, "response_1": second,
            "better_response_id": 1 - i % 2, "safer_response_id": i % 2}  # fmt: skip


def nan_score(i: int) -> dict[str, Any]:
    scores = [float("nan") if i in (7, 31) else 4.5, 1.5]
    return {"prompt": USER.format(i), "responses": [GOOD.format(i), BAD.format(i)], "scores": scores}


def string_prompt(i: int) -> dict[str, Any]:
    before = [SYSTEM] if 20 <= i < 40 else said(i, "Hello {}.", "Yes?") if i >= 40 else []
    return {"prompt": USER.format(i), "chosen": [*before, *said(i, USER, GOOD)],
            "rejected": [*before, *said(i, USER, BAD)]}  # fmt: skip


def edges(i: int) -> dict[str, Any]:
    odd = {
        3: {"chosen": "Rules." + hh(i, USER, GOOD), "rejected": "Rules." + hh(i, USER, BAD)},
        5: {"chosen": hh(i, USER, ""), "rejected": hh(i, USER, BAD)},
        8: {"chosen": hh(i, USER, GOOD, "Thanks."), "rejected": hh(i, USER, BAD)},
        11: {"chosen": hh(i, USER, "Hm.", "Yes.", GOOD), "rejected": hh(i, USER, "Oh.", "Yes.", BAD)},
        13: {"chosen": hh(i, USER, GOOD), "rejected": hh(i, USER, GOOD)},
    }
    return odd.get(i, {"chosen": hh(i, USER, GOOD), "rejected": hh(i, USER, BAD)})


def indented(i: int) -> dict[str, Any]:
    body = f"def total_{i}(rows):\n    found = {i}\n    for row in rows:\n        found += row\n"
    return {"prompt": f"Write total_{i} of rows.", "chosen": f"{body}    return found",
            "rejected": f"{body}        return found"}  # fmt: skip


TABLES: dict[str, tuple[list[Any], int, dict[str, int]]] = {
    "winner_index": ([winner_index(i) for i in range(60)], 60, {}),
    "nan_scores": ([nan_score(i) for i in range(60)], 58, {"not_a_number": 2}),
    "string_prompt": ([string_prompt(i) for i in range(60)], 60, {}),
    "hh": (
        [edges(i) for i in range(60)], 56,
        {"empty": 1, "ends_with_user": 1, "conversations_part": 1, "identical_replies": 1},
    ),
    "indentation": ([indented(i) for i in range(60)], 60, {}),
    "sharegpt_ranking": (
        [{"conversations": [{"from": "system", "value": "Be kind."},
                            {"from": "human", "value": USER.format(i)}],
          "chosen": {"from": "gpt", "value": GOOD.format(i)},
          "rejected": {"from": "gpt", "value": BAD.format(i)}} for i in range(60)], 60, {},
    ),
    "messages_rejected": (
        [{"messages": [SYSTEM, *said(i, USER, GOOD)], "rejected_response": BAD.format(i)}
         for i in range(60)], 60, {},
    ),
    "ultrafeedback": (
        [{"instruction": USER.format(i), "completions": [
            {"response": text.format(i), "overall_score": score}
            for text, score in ((BAD, 2.0), (GOOD, 8.0))]} for i in range(60)], 60, {},
    ),
    "shp": (
        [{"history": USER.format(i), "human_ref_A": (GOOD if i % 2 else BAD).format(i),
          "human_ref_B": (BAD if i % 2 else GOOD).format(i), "labels": i % 2}
         for i in range(60)], 60, {},
    ),
    "unpaired": (
        [{"prompt": USER.format(i // 2), "completion": (BAD if i % 2 else GOOD).format(i // 2),
          "label": not i % 2} for i in range(120)], 60, {},
    ),
}  # fmt: skip


def checked(root: Path, content: list[Any], *arguments: Any) -> Inspection:
    with gzip.open(root / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, content)))
    params = load(ROOT / "recipes/demo.yaml")
    return inspect("rows.jsonl.gz", root, params, *(arguments or (None, {})))


@pytest.mark.parametrize("name", TABLES)
def test_the_data_stage_does_what_the_check_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, pairs, refused = TABLES[name]
    monkeypatch.chdir(tmp_path)
    result = checked(tmp_path, content)
    assert (result.pairs, result.warnings) == (pairs, [])
    assert {reason: item["rows"] for reason, item in result.refused.items()} == refused
    metrics = run(
        tmp_path, result.source, test_fraction=0.3, max_quarantine_fraction=0.1, sft_source=None,
        prompt_source=None, vote_source=None, model={"context_length": 200},
    )  # fmt: skip
    quarantined = {key: value for key, value in metrics.items() if key.startswith("quarantined_")}
    assert quarantined == {f"quarantined_{reason}": count for reason, count in refused.items()}
    result = [row for split in ("train", "test") for row in rows(tmp_path, "preference", split)]
    assert len(result) == pairs
    text = "indentation" if name == "indentation" else "kettle is here"
    for row in result:
        chosen, rejected = (
            row[side] if isinstance(row[side], str) else row[side][0]["content"] for side in ("chosen", "rejected")
        )
        if text == "indentation":
            assert chosen.endswith("\n    return found")
            assert rejected.endswith("\n        return found")
        else:
            assert (text in chosen, text in rejected) == (True, False)


def test_a_reader_of_ones_own_is_checked_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from training.preparation.sources import rows_in\n"
        "def read(path):\n"
        "    for row in rows_in(path):\n"
        "        sides = [row['left'], row['right']]\n"
        "        good, bad = sides if row['winner'] == 'left' else sides[::-1]\n"
        "        yield {'prompt': row['ask'], 'chosen': good, 'rejected': bad}\n"
    )
    crowd = [{"ask": USER.format(i), "left": GOOD.format(i), "right": BAD.format(i),
              "winner": "left"} for i in range(60)]  # fmt: skip
    crowd.append({"ask": "Same?", "left": "x", "right": "x", "winner": "left"})
    result = checked(tmp_path, crowd, None, {}, None, "mine.py:read")
    assert (result.pairs, result.refused["identical_replies"]["first"]) == (60, "mine.py:read row 61, rejected")
    assert result.source == {"kind": "python", "path": "mine.py:read", "files": ["rows.jsonl.gz"]}
    metrics = run(tmp_path, result.source, test_fraction=0.3, sft_source=None, prompt_source=None, vote_source=None)
    assert metrics["quarantined_identical_replies"] == 1
    params = load(tmp_path / "params.yaml")
    assert set(params.data.local_paths().values()) == {"mine.py", "rows.jsonl.gz"}


def test_rows_that_the_models_template_refuses_are_refused_by_check_and_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = trained_tokenizer([GOOD, BAD, USER], 300)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ messages[-1].content }}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    content = [
        {"prompt": [*([SYSTEM] if i < 6 else []), *said(i, USER)], "chosen": said(i, "", GOOD)[1:],
         "rejected": said(i, "", BAD)[1:]} for i in range(60)
    ]  # fmt: skip
    with gzip.open("rows.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, content)))
    model = {"path": "base", "random": None, "context_length": 200}
    params = load(ROOT / "recipes/demo.yaml", ["model.path=base", "model.random=null"])
    inspection = inspect("rows.jsonl.gz", tmp_path, params, None, {})
    assert inspection.refused == {
        "chat_template": {
            "rows": 6,
            "first": "rows.jsonl.gz line 1",
            "detail": "the chat template says: System role not supported.",
        }
    }
    metrics = run(
        tmp_path, inspection.source, test_fraction=0.3, max_quarantine_fraction=0.2, sft_source=None,
        prompt_source=None, vote_source=None, model=model,
    )  # fmt: skip
    assert metrics["quarantined_chat_template"] == 6
