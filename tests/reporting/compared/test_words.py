import pytest

from costs.ledger.cost_change import CostChange, Work, reasons
from reporting.compared.side_by_side import SAME, Estimate, Metric
from reporting.compared.words import difference, estimate, judged, letter, signed_usd, why
from reporting.numbers import decimal, percent

SHARE, NUMBER = Metric("evaluate", "win", "Wins", percent), Metric("evaluate", "kl", "KL", decimal)


def change(before: Work | None, after: Work | None, phase: str = "train") -> CostChange:
    return CostChange(
        "sft", phase, before, after, reasons(before, after) if before and after else {"phases": 1.0}
    )


def test_runs_are_letters() -> None:
    assert [letter(i) for i in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "$0"), (1.5, "+$1.50"), (-0.02, "−$0.020"), (4e-8, "≈$0"), (-4e-8, "≈$0")],
)
def test_differences_of_money_have_a_sign(value: float, shown: str) -> None:
    assert signed_usd(value) == shown


def test_differences_of_shares_are_in_points() -> None:
    assert difference(Estimate(0.075, 0.035, 0.115), SHARE) == "+7.5 points (+3.5 to +11.5)"
    assert difference(Estimate(-3.83), NUMBER) == "−3.83"
    assert estimate(Estimate(0.926, 0.896, 0.948), SHARE) == "92.6% (89.6 to 94.8)"
    assert (difference(SAME, SHARE), judged(SAME)) == ("same", "")
    assert [judged(Estimate(0.1, *span)) for span in ((0.05, 0.15), (-0.1, 0.3))] == [
        "clear",
        "may be chance",
    ]


def test_the_largest_reason_comes_first_and_what_hardly_counts_is_left_out() -> None:
    assert why(change(Work(3600, 1000, 1.0), Work(3600, 1000, 2.0)), "A", "B") == "2.0× price"
    assert (
        why(change(Work(3600, 1000, 1.0), Work(7200, 2000, 4.0)), "A", "B")
        == "4.0× price +$4.67, 2.0× tokens +$2.33"
    )
    assert why(change(Work(3600, 1000, 1.0), Work(1800, 1001, 1.0)), "A", "B") == "2.0× tokens/s"
    assert why(change(Work(3600, 0, 1.0), Work(1800, 0, 1.0)), "A", "B") == "0.50× time"
    assert why(change(None, Work(3600, 0, 1.0)), "A", "B") == "only in B"
    assert why(change(Work(3600, 10, 1.0), Work(3600, 10, 1.0)), "A", "B") == ""
