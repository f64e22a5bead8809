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
    found = summary(PAIRS, votes)
    assert (found["pairs"], found["pairs_with_votes"], found["pairs_with_several_votes"]) == (4, 3, 2)
    assert (found["votes"], found["votes_replaced"], found["agreement"]) == (6, 1, 0.5)
    assert found["annotators"] == [
        {"annotator": "ada", "votes": 2, "ties": 1, "skipped": 1, "left": 1.0},
        {"annotator": "bob", "votes": 3, "ties": 0, "skipped": 0, "left": 0.0},
        {"annotator": "cyd", "votes": 1, "ties": 0, "skipped": 0, "left": None},
    ]
    assert [(couple["first"], couple["second"], couple["units"]) for couple in found["couples"]] == [("ada", "bob", 2)]
    assert found["couples"][0]["kappa"] == pytest.approx(1 / 3)  # p_o 1/2, p_e 1/2 * 1/2


def test_nothing_labelled_is_no_number() -> None:
    found = summary(PAIRS, [])
    assert (
        found["votes"],
        found["agreement"],
        found["krippendorff_alpha"],
        found["annotators"],
        found["couples"],
    ) == (0, None, None, [], [])
