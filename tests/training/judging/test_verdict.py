"""What an evaluation learns from its judge, and from people's votes beside it."""

from pathlib import Path

import pytest

from config import jsonl
from config.errors import DataError, ParamsError
from config.load import load
from config.prerequisites import require_judge
from config.schema import Params
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from labelling.judging import JUDGE_PAIRS, pairs_to_judge
from labelling.votes import read_pairs
from tests.conftest import ROOT
from training.judging import verdict
from training.judging.judge import Pair
from training.judging.people import votes_on
from training.process.artifacts import write_jsonl

COUNT = 60
PROMPTS = [f"prompt {i}" for i in range(COUNT)]
OURS, THEIRS = [f"good {i}" for i in range(COUNT)], [f"bad {i}" for i in range(COUNT)]


class Taste:
    """Prefers what begins with a word, and is paid for it."""

    name, usd = "taste", 0.25

    def __init__(self, word: str) -> None:
        self.word = word
        self.asked = 0

    def prefer(self, pairs: list[Pair]) -> list[float | None]:
        self.asked += len(pairs)
        return [0.5 + 0.5 * (pair.first.startswith(self.word) - pair.second.startswith(self.word)) for pair in pairs]


def with_people() -> Params:
    judge = "evaluate.judge={kind: people, path: data/judge/votes.jsonl, fewest: 20}"
    return load(ROOT / "tests/e2e/tiny.yaml", [judge])


def prefer(monkeypatch: pytest.MonkeyPatch, judge: Taste) -> Params:
    monkeypatch.setattr(verdict, "chosen", lambda *_: judge)
    return load(ROOT / "tests/e2e/tiny.yaml", ["evaluate.judge={kind: reward_model, path: x}"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = [{"prompt": f"human {i}", "chosen": f"good {i}", "rejected": f"bad  {i}"} for i in range(40)]
    write_jsonl(tmp_path / "data/prepared/preference/test.jsonl", rows)
    return tmp_path


def vote(root: Path, count: int, preferred: int = 1) -> None:
    rows = [
        {"prompt": PROMPTS[i], "response1": OURS[i], "response2": THEIRS[i], "vote": preferred, "annotator": "ann"}
        for i in range(count)
    ]
    write_jsonl(root / "data/judge/votes.jsonl", rows)


def test_a_judge_that_people_bear_out_gives_a_verdict(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = verdict.judged(root, prefer(monkeypatch, Taste("good")), PROMPTS, OURS, THEIRS)
    assert (result.name, result.fault, result.usd) == ("taste", None, 0.25)
    assert result.preferences == [1.0] * COUNT
    assert result.metrics["win_rate_judge"] == 1
    assert result.metrics["judge_accuracy"] == 1
    assert result.metrics["position_flip_rate"] == 0
    assert "judge_votes" not in result.metrics


def test_a_judge_without_a_say_is_not_asked_about_the_replies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Taste("bad")
    result = verdict.judged(root, prefer(monkeypatch, judge), PROMPTS, OURS, THEIRS)
    assert judge.asked == 80
    assert result.preferences is None
    assert "chance could do" in str(result.fault)
    assert result.metrics["win_rate_judge"] is None
    assert result.metrics["judge_accuracy"] == 0


def test_a_few_votes_stand_beside_the_judge(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vote(root, 12, preferred=2)
    result = verdict.judged(root, prefer(monkeypatch, Taste("good")), PROMPTS, OURS, THEIRS)
    assert result.metrics["judge_votes"] == 12
    assert result.metrics["win_rate_votes"] == 0
    assert result.metrics["win_rate_judge_and_votes"] < 0.5


def test_people_judge_once_they_are_enough(root: Path) -> None:
    few = verdict.judged(root, with_people(), PROMPTS, OURS, THEIRS)
    assert "0 of evaluate.judge.fewest=20 prompts have a vote" in str(few.fault)
    assert (few.preferences, few.metrics["win_rate_judge"]) == (None, None)
    vote(root, 20)
    result = verdict.judged(root, with_people(), PROMPTS, OURS, THEIRS)
    assert result.metrics["win_rate_judge"] == 1
    assert result.preferences == [1.0] * 20 + [None] * 40


def test_votes_on_other_replies_skips_and_replaced_votes_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    usual = {"prompt": "p", "response1": "ours", "response2": "theirs", "annotator": "a"}
    rows = [
        usual | {"vote": 1},
        usual | {"vote": 2},
        usual | {"vote": 0, "annotator": "b", "response1": "theirs", "response2": "ours"},
        usual | {"vote": None, "annotator": "c"},
        usual | {"vote": 1, "annotator": "d", "response2": "another"},
    ]
    write_jsonl(path, rows)
    assert votes_on(path, ["p"], ["ours"], ["theirs"]) == {0: 0.25}
    assert votes_on(tmp_path / "none", ["p"], ["ours"], ["theirs"]) == {}


def test_pairs_for_people_are_the_replies_of_the_evaluation_that_differ(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run the pipeline first"):
        pairs_to_judge(tmp_path)
    rows = [{"prompt": "p", "sft": "a", "aligned": "b"}, {"prompt": "q", "sft": "a", "aligned": "a"}]
    write_jsonl(tmp_path / "evaluation/samples.jsonl", rows)
    assert pairs_to_judge(tmp_path) == 1
    (pair,) = read_pairs(tmp_path / JUDGE_PAIRS)
    assert (pair.prompt, pair.response1, pair.response2) == ("p", "a", "b")


def test_what_a_judge_lacks_is_known_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = "evaluate.judge={kind: embedding, path: models/judge/minilm}"
    tiny = ROOT / "tests/e2e/tiny.yaml"
    with pytest.raises(ParamsError, match=r"data\.judge_fraction=0 leaves it none"):
        require_judge(tmp_path, load(tiny, [embedding]))
    with pytest.raises(ParamsError, match="rlhf fetch minilm"):
        require_judge(tmp_path, load(tiny, [embedding, "data.judge_fraction=0.2"]))
    votes = "{kind: file, path: data/judge/votes.jsonl, format: votes, columns: {}}"
    with pytest.raises(ParamsError, match="is the judge's"):
        load(tiny, [f"data.vote_source={votes}"])
    require_judge(tmp_path, load(tiny))


def test_people_see_the_replies_of_a_contest_that_waits_for_them(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "evaluation/samples.jsonl", [{"prompt": "p", "sft": "a", "aligned": "b"}])
    replies = [{"prompt": "q", "champion": "old", "challenger": "new"},
               {"prompt": "r", "champion": "same", "challenger": "same"}]  # fmt: skip
    write_jsonl(tmp_path / "runs/retrain/one/replies.jsonl", replies)
    for outcome, expected in (("waiting", ["q"]), ("skipped", ["q"]), ("promoted", ["p"])):
        row = RetrainRow(time=1.0, cycle="one", event="end", outcome=outcome)
        jsonl.append(tmp_path / RETRAIN_ROWS, row)
        pairs_to_judge(tmp_path)
        assert [pair.prompt for pair in read_pairs(tmp_path / JUDGE_PAIRS)] == expected
