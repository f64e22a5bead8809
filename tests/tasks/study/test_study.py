"""Studies: the file, the runs, and the table."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.projects.checkouts import checkout
from config.errors import ParamsError
from config.workspace.study import StudyFile, StudyResult, read_study
from tasks.study.result import interval, quality, verdict
from tasks.study.runs import variants
from tests.conftest import ROOT

TINY = "tests/e2e/tiny.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: a.yaml\n", "variants: field required"),
        ("recipe: a.yaml\nvariants: {one: []}\n", "variants: dictionary should have at least 2"),
        ("recipe: a.yaml\nvariants: {a: [], b: []}\nseed: 1\n", "seed: extra inputs are not"),
        ("recipe: [\n", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ParamsError, match=said):
        read_study(tmp_path / "mine.yaml")
    with pytest.raises(ParamsError, match="cannot be read: No such file"):
        read_study(tmp_path / "none.yaml")


def test_the_study_of_the_repository_is_one() -> None:
    found = read_study(ROOT / "studies" / "levers.yaml")
    assert len(list(variants(ROOT, found))) == len(found.variants)


def test_variants_of_a_seed_follow_one_another_and_every_reply_is_judged() -> None:
    content = StudyFile(recipe=Path(TINY), seeds=[3, 4], variants={"a": [], "b": ["ppo.updates=2"]})
    found = list(variants(ROOT, content))
    assert [(each.name, each.seed) for each in found] == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]
    assert [each.params.seed for each in found] == [3, 3, 4, 4]
    assert found[1].params.ppo.updates == 2
    assert found[0].params.evaluate.samples == found[0].params.evaluate.prompts


def test_the_quality_of_a_reply_is_its_gold_score_or_whether_it_wins() -> None:
    row = {"gold_aligned": 0.7, "reward_aligned": 2.0, "reward_sft": 1.0, "reward_student": 1.0}
    assert quality(row, "aligned", by_gold=True) == 0.7
    assert quality(row, "aligned", by_gold=False) == 1.0
    assert quality(row, "student", by_gold=False) == 0.5


def test_the_interval_of_a_mean_by_hand() -> None:
    middle, low, high = interval([0.1, 0.3] * 50)
    half = 1.959964 * 0.1 * (100 / 99) ** 0.5 / 10
    assert (middle, low, high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))


@pytest.mark.parametrize(
    ("low", "high", "cheaper", "expected"),
    [
        (-0.01, 0.05, True, "cheaper and as good"),
        (-0.01, 0.05, False, "as good"),
        (-0.05, -0.03, True, "worse"),
        (-0.05, 0.05, True, "undecided"),
    ],
)
def test_a_variant_is_as_good_where_all_of_its_interval_is(
    low: float, high: float, cheaper: bool, expected: str
) -> None:
    assert verdict(low, high, 0.02, cheaper) == expected


@pytest.mark.integration
def test_a_study_is_killed_goes_on_and_shares_what_its_variants_share(tmp_path: Path) -> None:
    project = checkout(tmp_path / "project")
    (project / "tiny.yaml").write_bytes((ROOT / TINY).read_bytes())
    (project / "mine.yaml").write_text(
        "recipe: tiny.yaml\n"
        "variants:\n"
        "  as it is: []\n"
        "  fewer updates: [ppo.updates=2]\n"
        "  rloo: [align.method=rloo]\n"
    )
    command = [str(Path(sys.executable).with_name("rlhf")), "study", "mine.yaml", "--json"]
    environment = os.environ | {"PYTHONPATH": str(project)}
    first = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("2 of 3"):
            break
    time.sleep(6)
    first.send_signal(signal.SIGINT)
    rest = first.communicate(timeout=120)[1]
    assert "the same command goes on there" in rest
    assert first.returncode == 75
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 3: as it is, seed 1: done before" in done.stderr
    found = StudyResult.model_validate(json.loads(done.stdout))
    assert [each.name for each in found.variants] == ["as it is", "fewer updates", "rloo"]
    assert found.variants[0].verdict == "base"
    assert all(len(each.runs) == 1 for each in found.variants)
    costs = [each.measured_usd or 0.0 for each in found.variants]
    # data, SFT and reward model were made once
    assert found.spent_usd < 0.75 * sum(costs)
