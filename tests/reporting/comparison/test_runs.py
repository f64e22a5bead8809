"""Comparisons on the files that two runs leave."""

import json
import shutil
from pathlib import Path

import pytest

from config.errors import UserError
from reporting.comparison.page import comparison_page
from reporting.comparison.runs import (
    ABSENT_PARAM,
    Comparison,
    Metric,
    Run,
    Variant,
    compare,
    compare_runs,
    param_differences,
    read_run,
    reply_qualities,
)
from reporting.comparison.statistics import Estimate
from reporting.comparison.words import difference, estimate, letter, remarks, sentence
from reporting.numbers import decimal, percent
from tests.reporting.plausible_run import BEGIN
from tests.reporting.two_runs import FIRST, SECOND, write_two_runs
from tests.support.clock import Clock

SHARE, NUMBER = Metric("evaluate", "win", "Wins", percent), Metric("evaluate", "kl", "KL", decimal)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_two_runs(tmp_path)
    return tmp_path


def found(root: Path, *runs: str) -> Comparison:
    return compare_runs(root, runs or (FIRST, SECOND))


def with_replies(run: Run, golds: list[float]) -> Run:
    """The run with these replies, and no others."""
    rows = [
        {"prompt": str(i), "gold_aligned": gold, "reward_aligned": gold, "reward_sft": 0.5}
        for i, gold in enumerate(golds)
    ]
    metrics = {**run.findings.metrics, "evaluate": {"prompts": len(rows), "gold_aligned": 0.5}}
    findings = vars(run.findings) | {"samples": rows, "metrics": metrics}
    return run._replace(findings=type(run.findings)(**findings))


def test_a_section_that_only_one_run_has_is_told_key_by_key() -> None:
    contents = [{"lora": None, "a": 1}, {}, {"lora": {"rank": 8}, "a": 1}]
    assert param_differences(contents) == {
        "lora": [None, ABSENT_PARAM, ABSENT_PARAM],
        "lora.rank": [ABSENT_PARAM, ABSENT_PARAM, 8],
    }


def test_replies_are_paired_where_all_were_kept(root: Path) -> None:
    first, second = read_run(root, FIRST), read_run(root, SECOND)
    assert reply_qualities(first, "gold") is None  # eight of many
    golds = [0.1 * i for i in range(9)]
    variants = [
        Variant("base", {1: with_replies(first, golds)}),
        Variant("better", {1: with_replies(second, [gold + 0.1 for gold in golds])}),
    ]
    better = compare(variants).variants[1]
    assert better.difference is not None
    assert better.difference.low == pytest.approx(0.1)  # the same everywhere
    by_reward = reply_qualities(with_replies(first, [0.4, 0.5, 0.6]), "reward")
    assert by_reward == [0.0, 0.5, 1.0]


def test_without_all_replies_the_difference_is_that_of_the_metrics(root: Path) -> None:
    other = found(root).variants[1]
    assert other.difference is not None
    assert other.difference.low is None
    assert other.verdict == "undecided"
    assert other.differences["win_rate_gold"].value == pytest.approx(0.075)


def test_runs_without_a_plan_are_compared_too(root: Path) -> None:
    comparison = found(root)
    assert comparison.variants[0].planned_usd is None
    assert sentence(comparison).startswith(f"No variant is cheaper than '{FIRST}'")


def test_costs_leave_out_what_all_share(root: Path) -> None:
    content = found(root)
    assert content.shared == ["reward"]
    first = content.variants[0]
    rest = sum(usd for stage, usd in first.stages.items() if stage not in ("reward", "evaluate"))
    assert first.measured_usd == pytest.approx(rest)


def test_a_variant_that_was_not_run_says_why_and_breaks_nothing(root: Path) -> None:
    run = read_run(root, FIRST)
    variants = [Variant("base", {1: run}), Variant("broken", {}, reason="it burst")]
    content = compare(variants, growth={"size": {"base": 1.0, "broken": 2.0}})
    assert [variant.verdict for variant in content.variants] == ["base", "not run"]
    assert content.growth == []
    assert "it burst" in comparison_page(content, "t", "c")
    assert "No variant" in sentence(content)


def test_growth_is_fitted_to_the_work_of_the_named_variants(root: Path) -> None:
    runs = [read_run(root, run_id) for run_id in (FIRST, SECOND)]
    variants = [Variant(name, {1: run}) for name, run in zip("ab", runs, strict=True)]
    content = compare(variants, growth={"price": {"a": 1.0, "b": 2.0}})
    assert [item.factor for item in content.growth] in (["price"], [])
    assert all("price^" in line for line in remarks(content) if line.startswith("Cost grows"))


def test_intervals_of_another_level_are_left_out(root: Path) -> None:
    path = root / "runs/pipeline" / SECOND / "params.yaml"
    path.write_text(path.read_text().replace("confidence: 0.95", "confidence: 0.9"))
    win = found(root).variants[1].differences["win_rate_gold"]
    assert (win.value, win.low) == (pytest.approx(0.075), None)


def test_a_third_run_that_failed_early_is_beside_them(root: Path) -> None:
    clock = Clock(root, "third", BEGIN + 7200)
    folder = root / "runs/pipeline/third"
    folder.mkdir()
    shutil.copy(root / "runs/pipeline" / SECOND / "params.yaml", folder)
    clock.pipeline("start")
    clock.attempt("sft", 2, "start")
    clock.use("sft", 2, "start", 0, 5.0)
    clock.attempt("sft", 2, "end", exit_code=1, message="it burst")
    clock.pipeline("end", state="failed")
    content = found(root, FIRST, SECOND, "third")
    assert [variant.name for variant in content.variants] == [FIRST, SECOND, "third"]
    assert content.variants[2].metrics == {}
    assert any("third is failed" in note for note in content.notes)
    assert "third" in comparison_page(content, "t", "c")


def test_other_judges_are_noted(root: Path) -> None:
    assert not any("reward models" in note for note in found(root).notes)
    Clock(root, SECOND, BEGIN).pipeline(
        "stage", stage="reward", cached=True, attempt=1, detail={"outs": {"models/reward": "other"}}
    )
    assert any("different reward models" in note for note in found(root).notes)


def test_a_run_whose_params_are_gone_is_named(root: Path) -> None:
    (root / "runs/pipeline" / FIRST / "params.yaml").unlink()
    with pytest.raises(UserError, match=f"run {FIRST} cannot be compared"):
        found(root)


def test_the_json_is_json_and_the_page_escapes_what_models_wrote(root: Path) -> None:
    json.loads(found(root).model_dump_json())
    page = comparison_page(found(root), "t", "c")
    assert "thank you &lt;b&gt;&amp; bye&lt;/b&gt;" in page
    assert "<b>& bye" not in page
    assert not any(mark in page for mark in ("<script", "http://", "https://", " src=", "@import"))
    assert page == comparison_page(found(root), "t", "c")


def test_runs_are_letters() -> None:
    assert [letter(i) for i in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]


def test_differences_of_shares_are_in_points() -> None:
    assert difference(Estimate(0.075, 0.035, 0.115), SHARE) == "+7.5 points (+3.5 to +11.5) clear"
    assert difference(Estimate(0.1, -0.1, 0.3), NUMBER).endswith("may be chance")
    assert difference(Estimate(-3.83), NUMBER) == "\u22123.83"
    assert estimate(Estimate(0.926, 0.896, 0.948), SHARE) == "92.6% (89.6 to 94.8)"
    assert difference(Estimate(0.0, 0.0, 0.0), SHARE) == "same"
