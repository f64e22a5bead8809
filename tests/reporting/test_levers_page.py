"""The page of a comparison of levers."""

import re
from pathlib import Path

from config.workspace.levers import LEVERS, SCALE, keep
from reporting.charts import Series, line_chart
from reporting.levers_page import levers_page, levers_sentence, write_levers_page
from tests.support.levers import comparison, scale, variant


def test_a_variant_is_a_full_dot_joined_with_what_was_planned() -> None:
    page = levers_page(comparison(), None)
    full = re.findall(r'<circle class="dot (\w+)" cx="([\d.]+)"[^>]*r="4.5"', page)
    hollow = re.findall(r'<circle class="hollow (\w+)" cx="([\d.]+)"', page)
    assert [tone for tone, _ in full] == ["second", "accent", "quiet"]
    places = [float(x) for _, x in full]
    assert places[0] > places[1] > places[2], "by measured cost"
    assert len({x for _, x in hollow}) == 1, "all were planned at the same cost"
    assert "as good, 2.0 times cheaper" in page
    assert "not as good" in page


def test_what_did_not_run_or_failed_is_a_row_with_its_reason_and_its_cost() -> None:
    missing = variant("qlora", None, None, "not here", reason="never quantised")
    diverged = variant("fast", 0.001, None, "diverged", reason="ppo: NaN", waste_usd=0.001)
    page = levers_page(comparison(missing, diverged), None)
    assert "never quantised" in page
    row = page[page.index("ppo: NaN") :]
    assert "$0.0010" in row[: row.index("</tr>")]


def test_the_result_in_a_sentence() -> None:
    assert levers_sentence(comparison()) == (
        "cheap: same quality, 2.0 times cheaper ($0.0020 instead of $0.0040)."
    )
    alone = comparison().model_copy(update={"best": "baseline"})
    assert levers_sentence(alone) == (
        "No variant is cheaper than the baseline at the same quality."
    )


def test_the_planner_is_judged_and_its_wrong_pairs_are_named() -> None:
    page = levers_page(comparison(), None)
    assert "ranks 67% right" in page
    assert "worse is cheaper than cheap, planned the other way round" in page


def test_growth_is_on_the_same_page(tmp_path: Path) -> None:
    keep(tmp_path, comparison(), LEVERS)
    keep(tmp_path, scale(), SCALE)
    page = write_levers_page(tmp_path).read_text()
    assert "Less than quadratic." in page
    assert "time ~ model^0.93 (0.90 to 0.96), planned 0.95" in page


def test_a_file_of_another_version_is_no_result(tmp_path: Path) -> None:
    keep(tmp_path, scale(), LEVERS)
    assert "No levers have been compared yet." in write_levers_page(tmp_path).read_text()


def test_tooltips_have_whole_sizes_and_no_noise() -> None:
    points = [(1e-9, 1.0), (1.5, 2.0), (3.0, 3.0), (529200.0, 4.0)]
    page = str(line_chart([Series("measured", points, "accent")], "Seconds", x_name="size"))
    for place in ("size 0:", "size 1.50:", "size 3:", "size 529,200:"):
        assert place in page
