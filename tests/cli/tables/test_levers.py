"""The tables of `rlhf levers` and `rlhf scale` on a terminal."""

import pytest
from rich.console import Console, Group

from cli.tables.levers import levers_view, scale_view
from tests.support.levers import comparison, scale, variant


def shown(view: Group) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def test_a_comparison_fits_80_columns_and_says_what_it_came_to() -> None:
    long = variant(
        "trunk+fewer-passes", 0.0123456, 0.87, measured_seconds=3599.0, same_quality=False,
        measured_peak_bytes=2.0**31,
    )  # fmt: skip
    tiny = variant("tiny", 0.0123456, 0.9, difference_low=-0.000371)
    missing = variant("qlora", None, None, "not here", reason="a base is never quantised " * 3)
    lines = shown(levers_view(comparison(long, tiny, missing)))
    assert max(map(len, lines)) <= 80
    assert not any("\u2026" in line for line in lines), "nothing is cut"
    rows = {line.split()[0]: line for line in lines if line}
    assert rows["cheap"].endswith(" 0.50")
    assert "\u22120.01 " in rows["cheap"]
    assert "*" in rows["trunk+fewer-passes"]
    text = " ".join(lines)
    assert "cheap: same quality, 2.0 times cheaper" in text
    assert "The plan ranks 67% of 3 pairs right; its choice, cheap, costs 0% too much." in text
    assert "qlora: not here, a base is never quantised" in text


def test_growth_fits_80_columns() -> None:
    lines = shown(scale_view(scale()))
    assert max(map(len, lines)) <= 80
    assert "0.93" in lines[1]
    assert "0.90 to 0.96" in lines[1]
    assert "Less than quadratic." in lines


@pytest.mark.parametrize("best", ["baseline", None])
def test_without_a_cheaper_variant_it_says_so(best: str | None) -> None:
    lines = shown(levers_view(comparison().model_copy(update={"best": best})))
    assert "No variant is cheaper than the baseline at the same quality." in lines
