"""Pairs of responses from a real model: different, blinded, appended, repeatable."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from config import jsonl
from config.errors import DataError, ModelError
from config.load import load, write
from config.workspace.champions import Champion, ChampionRecord, champion_folder, write_record
from labelling.votes import read_pairs
from tests.training.support import tiny
from training.inference import pairs
from training.inference.pairs import draw_pairs, in_turn, in_use


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared prompts, a tokenizer, and a policy of random weights, which never says the same twice."""
    root = tmp_path_factory.mktemp("pairs")
    write(
        tiny.params(model={"random": tiny.settings().random.model_dump(), "context_length": tiny.CONTEXT}),
        root / "params.yaml",
    )
    tiny.tokenizer().save_pretrained(root / "data/tokenizer")
    tiny.policy().save_pretrained(root / "models/ppo")
    (root / "data/prepared/prompts").mkdir(parents=True)
    for split, first in (("train", 0), ("test", 8)):
        rows = [json.dumps({"prompt": f"my kettle is cracked {i}"}) + "\n" for i in range(first, first + 8)]
        (root / f"data/prepared/prompts/{split}.jsonl").write_text("".join(rows))
    return root


def draw(root: Path, target: Path, count: int, temperature: float = 1.0, seed: int | None = None) -> list[dict]:
    draw_pairs(root, load(root / "params.yaml"), target, count, temperature, seed)
    return list(jsonl.plain(target))


def test_the_same_seed_draws_the_same_pairs_of_different_responses(project: Path, tmp_path: Path) -> None:
    rows = draw(project, tmp_path / "a.jsonl", 6, seed=5)
    assert len({row["prompt"] for row in rows}) == 6
    assert all(row["response1"] != row["response2"] for row in rows)
    assert {(row["seed"], row["model"], len(row["model_digest"])) for row in rows} == {(5, "models/ppo", 16)}
    assert draw(project, tmp_path / "b.jsonl", 6, seed=5) == rows
    assert draw(project, tmp_path / "c.jsonl", 6, seed=6) != rows
    assert [pair[:3] for pair in read_pairs(tmp_path / "a.jsonl")] == [
        (row["prompt"], row["response1"], row["response2"]) for row in rows
    ]


def test_new_pairs_are_appended_and_ask_the_prompts_that_were_not_asked(project: Path, tmp_path: Path) -> None:
    first = draw(project, tmp_path / "p.jsonl", 10)
    both = draw(project, tmp_path / "p.jsonl", 6)
    assert both[:10] == first
    assert len({row["prompt"] for row in both}) == 16
    assert {row["seed"] for row in both[10:]} == {first[0]["seed"] + 10}


def test_prompts_asked_least_come_first() -> None:
    order = in_turn(["a", "b", "c", "d"], ["a", "a", "c"], 1)
    assert set(order[:2]) == {"b", "d"}
    assert order[2:] == ["c", "a"]


def test_a_model_that_says_the_same_twice_gives_one_line_and_keeps_the_file(project: Path, tmp_path: Path) -> None:
    before = draw(project, tmp_path / "p.jsonl", 2)
    with pytest.raises(DataError, match=r"16 prompts were the same.*--temperature 1e-06"):
        draw(project, tmp_path / "p.jsonl", 20, temperature=1e-6)
    assert list(jsonl.plain(tmp_path / "p.jsonl")) == before


def test_a_missing_model_or_missing_prompts_are_one_line(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/data/prepared")
    with pytest.raises(DataError, match="data stage writes the prompts"):
        draw(tmp_path / "copy", tmp_path / "p.jsonl", 2)
    shutil.rmtree(tmp_path / "copy/models")
    with pytest.raises(ModelError, match="models/ppo does not exist"):
        draw(tmp_path / "copy", tmp_path / "p.jsonl", 2)


def test_the_process_refuses_a_count_of_none(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["pairs", "--count", "0"])
    assert pairs.main() == 2
    assert not (project / pairs.PAIRS_FILE).exists()
    monkeypatch.setattr(sys, "argv", ["pairs", "--count", "2"])
    with torch.set_grad_enabled(True):
        assert pairs.main() == 0
    assert len(read_pairs(project / pairs.PAIRS_FILE)) == 2
    (project / pairs.PAIRS_FILE).unlink()


def test_pairs_are_drawn_from_the_champion_where_there_is_one(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "champions").mkdir(parents=True)
    settings = tiny.params(align={"method": "dpo"})
    assert in_use(root, settings) == (root, settings)
    shutil.copytree(project, champion_folder(root, "r1"))
    write_record(
        root,
        ChampionRecord(
            lineage=(Champion(run_id="r1", method="ppo", model_digest="m", data_version="d", data_key="k"),)
        ),
    )
    folder, params = in_use(root, settings)
    assert (folder, params.align.method, params.model.context_length) == (
        champion_folder(root, "r1"),
        "ppo",
        tiny.CONTEXT,
    )
    draw_pairs(folder, params, root / "pairs.jsonl", 3, 1.0, None)
    rows = list(jsonl.plain(root / "pairs.jsonl"))
    assert {row["model"] for row in rows} == {str(root / "champions/r1/models/ppo")}
