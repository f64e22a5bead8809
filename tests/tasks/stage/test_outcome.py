import pytest

from config.errors import EXIT_DIVERGED, OverBudget, StageStopped, UserError
from config.records import AttemptRow
from tasks.stage.outcome import StageCrashed, judge
from tasks.stage.process import Ended


def row(attempt: int, event: str, code: int | None = None, message: str = "", step: int = 0) -> AttemptRow:
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


def ended(code: int, output: str = "") -> Ended:
    return Ended(pid=1, code=code, lived_seconds=1.0, output=output)


def test_the_attempt_of_the_process_made_the_outputs() -> None:
    assert judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", 0)], ended(0)) == 2


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (2, UserError, "^sft: said$"),
        (75, StageStopped, "^said$"),
        (76, OverBudget, "^said$"),
        (1, StageCrashed, "attempt 2 failed after step 5: said"),
        (134, StageCrashed, "said"),
    ],
)
def test_the_exit_code_decides(code: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", code, "said", 5)], ended(code))


def test_a_killed_process_is_tried_again() -> None:
    with pytest.raises(StageCrashed, match="was killed without an error message") as crash:
        judge("sft", 1, [*OLD, row(2, "start")], ended(-9))
    assert not crash.value.hopeless


def test_a_process_killed_after_its_last_row_is_tried_again() -> None:
    with pytest.raises(StageCrashed, match="was killed after the work was done") as crash:
        judge("sft", 1, [*OLD, row(2, "start"), row(2, "end", 0)], ended(-9))
    assert not crash.value.hopeless


@pytest.mark.parametrize(("step", "hopeless"), [(5, True), (6, False)])
def test_only_the_same_words_at_the_same_step_are_hopeless(step: int, hopeless: bool) -> None:
    rows = [row(1, "start"), row(1, "end", 1, "nan", 5), row(2, "start"), row(2, "end", 1, "nan", step)]
    with pytest.raises(StageCrashed) as crash:
        judge("sft", 1, rows, ended(1))
    assert crash.value.hopeless is hopeless


def test_a_divergence_is_hopeless_the_first_time() -> None:
    rows = [row(1, "start"), row(1, "end", EXIT_DIVERGED, "loss is nan at step 3.", 3)]
    with pytest.raises(StageCrashed, match="loss is nan at step 3") as crash:
        judge("sft", 0, rows, ended(EXIT_DIVERGED))
    assert crash.value.hopeless


def test_a_line_of_the_stage_before_its_first_row_is_the_users() -> None:
    with pytest.raises(UserError, match=r"^sft: params\.yaml is bad\.$"):
        judge("sft", 1, OLD, ended(2, "Running\nsft: params.yaml is bad.\n"))


def test_a_command_that_is_not_there_says_so() -> None:
    with pytest.raises(StageCrashed, match="failed before it began: sh: 1: x: not found") as crash:
        judge("sft", 1, OLD, ended(127, "sh: 1: x: not found\n"))
    assert crash.value.hopeless


def test_a_launcher_that_lost_a_process_says_which() -> None:
    line = "sft: process 1 of 2 was killed by SIGKILL: the others end too.\n"
    with pytest.raises(StageCrashed, match="attempt 2 failed: process 1 of 2 was killed by") as crash:
        judge("sft", 1, [*OLD, row(2, "start")], ended(1, line))
    assert not crash.value.hopeless
