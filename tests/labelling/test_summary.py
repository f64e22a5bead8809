"""What `rlhf label --report` counts."""

import pytest

from labelling.summary import summary
from labelling.votes import Pair, Vote

PAIRS = [Pair(f"p{i}", "a", "b") for i in range(4)]


def test_counts_are_of_the_votes_that_count() -> None:
    votes = [
        Vote(PAIRS[0], "ada", 2, 1),
        Vote(PAIRS[0], "ada", 1, 1),
        Vote(PAIRS[0], "bob", 1, 2),
        Vote(PAIRS[1], "ada", 0, 1),
        Vote(PAIRS[1], "bob", 2, 1),
        Vote(PAIRS[2], "ada", None, 1),
        Vote(PAIRS[2], "bob", 1),
        Vote(Pair("elsewhere", "a", "b"), "cyd", 1),
    ]
    summary_text = summary(PAIRS, votes)
    assert (summary_text["pairs"], summary_text["pairs_with_votes"], summary_text["pairs_with_several_votes"]) == (
        4,
        3,
        2,
    )
    assert (summary_text["votes"], summary_text["votes_replaced"], summary_text["agreement"]) == (6, 1, 0.5)
    assert summary_text["annotators"] == [
        {"annotator": "ada", "votes": 2, "ties": 1, "skipped": 1, "left": 1.0},
        {"annotator": "bob", "votes": 3, "ties": 0, "skipped": 0, "left": 0.0},
        {"annotator": "cyd", "votes": 1, "ties": 0, "skipped": 0, "left": None},
    ]
    assert [(couple["first"], couple["second"], couple["units"]) for couple in summary_text["couples"]] == [
        ("ada", "bob", 2)
    ]
    assert summary_text["couples"][0]["kappa"] == pytest.approx(1 / 3)  # p_o 1/2, p_e 1/2 * 1/2


def test_nothing_labelled_is_no_number() -> None:
    summary_text = summary(PAIRS, [])
    assert (
        summary_text["votes"],
        summary_text["agreement"],
        summary_text["krippendorff_alpha"],
        summary_text["annotators"],
        summary_text["couples"],
    ) == (0, None, None, [], [])
