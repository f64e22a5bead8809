"""What a measured run is reported as."""

from dataclasses import replace

import pytest

from benchmarks.ppo_vs_trl import median_time
from benchmarks.trl_comparison.runs import Measurement

RUN = Measurement(
    update_seconds=[9.0, 2.0, 4.0, 3.0],
    phases={"update": 1.5},
    peak_bytes=1000,
    batch_size=6,
    prompt_lengths=[[3, 3]] * 4,
    response_lengths=[[2, 4], [6, 8], [2, 2], [4, 4]],
    golds=[0.4, 0.5, 0.9, 0.7],
    gold_final=0.8,
)


def test_the_first_update_is_not_timed() -> None:
    assert RUN.episodes_per_second == pytest.approx(6 / 3.0)


def test_a_single_update_is_timed_for_want_of_another() -> None:
    assert replace(RUN, update_seconds=[3.0]).episodes_per_second == pytest.approx(2.0)


def test_a_gold_score_is_reached_when_three_updates_together_have_it() -> None:
    assert RUN.seconds_to_gold(0.6) == pytest.approx(15.0)
    assert RUN.seconds_to_gold(0.65) == pytest.approx(18.0)
    assert RUN.seconds_to_gold(0.75) is None


def test_mean_response_tokens_are_over_all_episodes() -> None:
    assert RUN.mean_response_tokens == pytest.approx(4.0)


def test_the_median_time_is_unknown_when_half_of_the_runs_never_arrive() -> None:
    late = replace(RUN, golds=[0.0] * 4)
    assert median_time([RUN, late, RUN], 0.6) == pytest.approx(15.0)
    assert median_time([RUN, late], 0.6) is None
    assert median_time([late, late, RUN], 0.6) is None
