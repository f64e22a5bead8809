"""Signs of trouble, each alone."""

import pytest

from config.errors import TrainingDiverged
from training.distillation.signs import check_responses, check_step


def test_a_student_that_learns_to_end_is_healthy() -> None:
    lengths = [48.0] * 5 + [30.0, 20.0, 17.0] + [16.0] * 10
    check_responses(lengths, [0.0] * 5 + [0.5] + [1.0] * 12, 16.0)
    check_responses([48.0] * 20, [0.0] * 20, 16.0)


def test_responses_that_grow_far_beyond_the_teachers_are_named() -> None:
    with pytest.raises(TrainingDiverged, match=r"grown to 40\.0 tokens, the teacher's have 16\.0"):
        check_responses([16.0] * 5 + [40.0] * 5, [1.0] * 10, 16.0)
    check_responses([16.0] * 5 + [31.0] * 5, [1.0] * 10, 16.0)
    check_responses([16.0] * 5 + [40.0] * 5, [1.0] * 10, None)


def test_a_falling_share_of_responses_that_end_is_named() -> None:
    with pytest.raises(TrainingDiverged, match="only 40% of the student's responses end, after 90"):
        check_responses([16.0] * 15, [0.1] * 5 + [0.9] * 5 + [0.4] * 5, 16.0)
    check_responses([16.0] * 15, [0.1] * 5 + [0.9] * 5 + [0.5] * 5, 16.0)


@pytest.mark.parametrize(("loss", "norm", "named"), [(float("nan"), 1.0, "loss is nan"), (1.0, float("inf"), "norm")])
def test_what_is_not_finite_is_named(loss: float, norm: float, named: str) -> None:
    with pytest.raises(TrainingDiverged, match=named):
        check_step(loss, norm, 3)
    check_step(1.0, 1.0, 3)
