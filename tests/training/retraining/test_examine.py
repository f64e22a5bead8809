"""The data of today against the champion's, on a project whose stages really ran."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from config import jsonl
from config.errors import DataError
from config.workspace.retraining import Examination
from tests.training.support.tiny import files, params
from training.inference.trained_models import TrainedModels
from training.retraining.examine import examine

VOTES = {"kind": "file", "path": "votes.jsonl", "format": "votes", "columns": {}}


@pytest.fixture
def champion(finished: Path) -> TrainedModels:
    return TrainedModels(finished)


def votes(root: Path, pairs: list[dict[str, Any]], first_wins: bool = True) -> None:
    rows = [
        {
            "prompt": pair["prompt"],
            "response1": pair["chosen"],
            "response2": pair["rejected"],
            "annotator": "ada",
            "vote": 1 if first_wins else 2,
        }
        for pair in pairs
    ]
    (root / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def look(root: Path, champion: TrainedModels, **data: Any) -> Examination:
    return examine(root, params(data=data), champion)


def new_pairs(finished: Path) -> list[dict[str, Any]]:
    """Known prompts and replies, put together anew."""
    rows = list(jsonl.plain(finished / "data/prepared/preference/train.jsonl"))[:40]
    return [
        {**row, "rejected": other["chosen"]}
        for row, other in itertools.pairwise(rows)
        if other["chosen"] != row["chosen"]
    ]


def test_the_same_sources_have_nothing_new(champion: TrainedModels, tmp_path: Path) -> None:
    result = look(tmp_path, champion)
    assert result.changed_rows == 0
    assert (result.accuracy, result.length_drift, result.new_words) == (None, None, None)
    assert result.accuracy_before == champion.metrics("reward")["accuracy"]


def test_pairs_that_the_judge_takes_are_rows_that_moved(champion: TrainedModels, tmp_path: Path) -> None:
    result = look(tmp_path, champion, judge_fraction=0.3)
    assert result.added["preference/judge"] == result.removed["preference/train"] > 0
    assert result.added["preference/train"] == result.added["preference/test"] == 0


def test_votes_are_new_rows_and_the_champions_reward_model_is_asked_about_them(
    finished: Path, champion: TrainedModels, tmp_path: Path
) -> None:
    pairs, shares = new_pairs(finished), []
    for first_wins in (True, False):
        votes(tmp_path, pairs, first_wins)
        result = look(tmp_path, champion, vote_source=VOTES)
        assert result.changed_rows == result.added["preference/train"] == len(pairs)
        assert result.accuracy is not None
        assert result.accuracy.of == len(pairs)
        assert result.accuracy.low < result.accuracy.value < result.accuracy.high
        shares.append(result.accuracy.value)
    # the same pairs the other way round; only ties could count in both
    assert sum(shares) == pytest.approx(1)
    assert shares[0] != 0.5


def test_rows_that_were_taken_away_are_changes_too(champion: TrainedModels, tmp_path: Path) -> None:
    source = params().data.source.model_copy(update={"preference_rows": 80}).model_dump()
    result = look(tmp_path, champion, source=source)
    assert sum(result.removed.values()) == result.changed_rows == 20
    assert sum(result.added.values()) == 0


def test_prompts_of_another_kind_have_drifted(finished: Path, champion: TrainedModels, tmp_path: Path) -> None:
    pairs = [
        {
            **pair,
            "prompt": f"{pair['prompt']} by the way , my neighbour has bought the very same thing . order number {i}",
        }
        for i, pair in enumerate(new_pairs(finished))
    ]
    votes(tmp_path, pairs)
    result = look(tmp_path, champion, vote_source=VOTES)
    assert result.length_drift is not None
    assert result.length_drift.distance > result.length_drift.critical
    assert result.length_drift.mean_new > result.length_drift.mean_before + 5
    assert result.new_words is not None
    assert 0.2 < result.new_words.value < 0.6


def test_bad_lines_are_counted_and_too_many_are_an_error(
    finished: Path, champion: TrainedModels, tmp_path: Path
) -> None:
    votes(tmp_path, new_pairs(finished))
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write("{cut\n" * 3)
    assert look(tmp_path, champion, vote_source=VOTES).refused == 3
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write("{cut\n" * 100)
    with pytest.raises(DataError, match="not_json"):
        look(tmp_path, champion, vote_source=VOTES)


def test_looking_changes_nothing(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "project")
    votes(tmp_path / "project", new_pairs(finished))
    before = files(tmp_path / "project")
    look(tmp_path / "project", TrainedModels(tmp_path / "project"), vote_source=VOTES)
    assert files(tmp_path / "project") == before
