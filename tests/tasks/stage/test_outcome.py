import pytest

from config.errors import EXIT_DIVERGED, EnvironmentFault, StageStopped, UserError
from config.records import AttemptRow
from tasks.stage.outcome import Outcome, StageCrashed, judge, last_attempt, last_done


def row(
    attempt: int, event: str, code: int | None = None, message: str = "", step: int = 0
) -> AttemptRow:
    content = {
        "time": 0.0,
        "run_id": "r",
        "attempt": attempt,
        "event": event,
        "fingerprint": "",
        "pid": 1,
        "step": step,
    }
    return AttemptRow.model_validate({**content, "exit_code": code, "message": message})


OLD = [row(1, "start"), row(1, "end", 0)]


def test_a_new_attempt_that_ended_well_made_the_outputs() -> None:
    assert judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", 0)], 0, "") == Outcome(
        cached=False, attempt=2
    )


def test_without_a_new_attempt_the_newest_good_one_made_them() -> None:
    assert judge("sft", 2, [*OLD, row(2, "start"), row(2, "end", 1)], 0, "") == Outcome(
        cached=True, attempt=1
    )


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (2, UserError, "sft: said"),
        (75, StageStopped, "said"),
        (1, StageCrashed, "attempt 2 failed after step 5: said"),
        (134, StageCrashed, "said"),
    ],
)
def test_the_exit_code_of_the_attempt_decides(
    code: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", code, "said", 5)], 255, "")


def test_an_attempt_without_an_end_was_killed() -> None:
    with pytest.raises(StageCrashed, match="attempt 2 was killed") as crash:
        judge("sft", 1, [*OLD, row(2, "start")], 255, "")
    assert not crash.value.hopeless


@pytest.mark.parametrize(
    ("code", "said", "killed"),
    [
        (
            255,
            "ERROR: failed to reproduce 'sft': failed to run: python -m x, exited with -9",
            "the process of attempt 2",
        ),
        (-9, "", "DVC"),
    ],
)
def test_a_process_killed_after_its_last_row_is_tried_again(
    code: int, said: str, killed: str
) -> None:
    with pytest.raises(StageCrashed, match=f"{killed} was killed after") as crash:
        judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", 0)], code, said)
    assert not crash.value.hopeless


@pytest.mark.parametrize(("step", "hopeless"), [(5, True), (6, False)])
def test_only_the_same_words_at_the_same_step_are_hopeless(step: int, hopeless: bool) -> None:
    rows = [
        row(1, "start"),
        row(1, "end", 1, "nan", 5),
        row(2, "start"),
        row(2, "end", 1, "nan", step),
    ]
    with pytest.raises(StageCrashed) as crash:
        judge("sft", 1, rows, 255, "")
    assert crash.value.hopeless is hopeless


def test_a_divergence_is_hopeless_the_first_time() -> None:
    rows = [row(1, "start"), row(1, "end", EXIT_DIVERGED, "loss is nan at step 3.", 3)]
    with pytest.raises(StageCrashed, match="loss is nan at step 3") as crash:
        judge("sft", 0, rows, 255, "")
    assert crash.value.hopeless


def test_a_done_stage_whose_outputs_dvc_could_not_keep_is_not_done() -> None:
    with pytest.raises(EnvironmentFault, match="output 'x' does not exist"):
        judge(
            "sft",
            1,
            [*OLD, row(2, "start"), row(2, "end", 0)],
            255,
            "noise\nERROR: output 'x' does not exist\n",
        )


def test_a_line_of_the_stage_before_its_first_row_is_the_users() -> None:
    with pytest.raises(UserError, match=r"^sft: params\.yaml is bad\.$"):
        judge("sft", 1, OLD, 255, "Running\nsft: params.yaml is bad.\nERROR: failed to reproduce\n")


def test_dvcs_own_error_is_told_when_no_process_began() -> None:
    with pytest.raises(EnvironmentFault, match="DVC could not run sft: lock is busy"):
        judge("sft", 1, OLD, 255, "ERROR: lock is busy\n")


def test_attempt_numbers_of_an_empty_history() -> None:
    assert (last_attempt([]), last_done([])) == (0, None)
