"""Agreement between annotators against hand-computed and published numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labelling.agreement import Unit, cohen_kappa, couples, krippendorff_alpha, observed_agreement

KRIPPENDORFF_2011 = {
    "A": "1 2 3 3 2 1 4 1 2 . . .",
    "B": "1 2 3 3 2 2 4 1 2 5 . 3",
    "C": ". 3 3 3 2 3 4 2 2 5 1 .",
    "D": "1 2 3 3 2 4 4 1 2 5 1 .",
}
"""Section C of Computing Krippendorff's alpha-reliability: four observers, twelve units, judgements missing."""


def units(rows: dict[str, str]) -> list[Unit]:
    columns = zip(*(row.split() for row in rows.values()), strict=True)
    return [{name: vote for name, vote in zip(rows, column, strict=True) if vote != "."} for column in columns]


def test_alpha_is_that_of_the_published_example() -> None:
    assert krippendorff_alpha(units(KRIPPENDORFF_2011)) == pytest.approx(0.743, abs=5e-4)


def test_kappa_of_a_table_computed_by_hand() -> None:
    # p_o 0.7, p_e 0.5 * 0.6 + 0.5 * 0.4
    both = [(1, 1)] * 20 + [(1, 2)] * 5 + [(2, 1)] * 10 + [(2, 2)] * 15
    assert cohen_kappa(both) == pytest.approx(0.4)


def test_full_agreement_is_one_and_a_single_category_says_nothing() -> None:
    alike = units({"a": "1 2 0", "b": "1 2 0"})
    assert (observed_agreement(alike), krippendorff_alpha(alike), couples(alike)[0].kappa) == (1, 1, 1)
    constant = units({"a": "1 1", "b": "1 1"})
    assert (observed_agreement(constant), krippendorff_alpha(constant), couples(constant)[0].kappa) == (1, None, None)


def test_only_units_with_two_judgements_count() -> None:
    result = units({"a": "1 1 2 .", "b": "1 2 . 2"})
    assert observed_agreement(result) == 0.5
    assert couples(result)[0][:4] == ("a", "b", 2, 0.5)
    assert krippendorff_alpha(result) == krippendorff_alpha(result[:2])


def test_nothing_judged_is_no_number() -> None:
    assert (observed_agreement([]), krippendorff_alpha([]), couples([]), cohen_kappa([])) == (None, None, [], None)
    alone = units({"a": "1 2"})
    assert (observed_agreement(alone), krippendorff_alpha(alone), couples(alone)) == (None, None, [])


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([0, 1, 2])), min_size=1))
def test_agreement_does_not_know_who_is_first_nor_what_the_votes_are_called(both: list[tuple[int, int]]) -> None:
    renamed = [({0: 5, 1: 3, 2: 4}[b], {0: 5, 1: 3, 2: 4}[a]) for a, b in both]
    assert cohen_kappa(renamed) == pytest.approx(cohen_kappa(both))
    alpha, other = (krippendorff_alpha([{"a": a, "b": b} for a, b in rows]) for rows in (both, renamed))
    assert other == pytest.approx(alpha)
    assert alpha is None or alpha <= 1
