"""The measured ledger against sums done by hand. Price in all of them: 3.6 USD per device hour, so one device second
is 0.001 USD.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.errors import CostError
from config.load import load
from config.records import AttemptRow, PipelineRow, UsageRow
from config.schema import Params
from config.workspace.at_work import locked
from costs.ledger.attempts import Attempt, kept_step, read_attempts, split_usage
from costs.ledger.budget import total
from costs.ledger.ledger import read_ledger
from tasks.planning.prepared import spent_by_stage
from tasks.run.purse import expenses_of
from tests.support.clock import Clock

ROOT = Path(__file__).parents[3]


@pytest.fixture
def params() -> Params:
    return load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=3.6"])


def pipeline(
    root: Path, run_id: str, event: Literal["start", "stage", "end"], time: float = 0.0, **values: Any
) -> None:
    jsonl.append(root / "runs" / "pipeline.jsonl", PipelineRow(time=time, run_id=run_id, event=event, **values))


class Process:
    """Writes the rows of one attempt as a stage process would; each phase follows the one before it without a gap."""

    def __init__(
        self,
        root: Path,
        stage: str,
        number: int,
        run_id: str,
        begin: float,
        fingerprint: str = "f",
        world_size: int = 1,
    ) -> None:
        self.folder, self.clock = root / "runs" / stage, begin
        self.common: dict[str, Any] = {"run_id": run_id, "attempt": number, "device": "cpu", "world_size": world_size}
        self.event("start", fingerprint=fingerprint)

    def event(self, event: Any, fingerprint: str = "f", step: int = 0, **values: Any) -> None:
        common = {"time": self.clock, "event": event, "fingerprint": fingerprint, "step": step}
        row = AttemptRow(pid=1, **common, **self.common, **values)
        jsonl.append(self.folder / "attempts.jsonl", row)

    def use(self, phase: str, step: int, seconds: float, tokens: int = 0, peak_bytes: int = 0) -> None:
        self.clock += seconds
        work = {"tokens": tokens, "sequences": 1, "peak_bytes": peak_bytes, "seconds": seconds}
        row = UsageRow(time=self.clock, step=step, phase=phase, **work, **self.common)
        jsonl.append(self.folder / "usage.jsonl", row)

    def out_of_memory(self, phase: str, step: int, lost: float, seconds: float) -> None:
        """A phase that took `lost` before memory ran out in it, and `seconds` in smaller pieces."""
        self.clock += lost
        self.event("retry", step=step - 1, lost_seconds=lost)
        self.clock -= lost
        self.use(phase, step, lost + seconds)


Use = tuple[str, int, float]
"""Phase, step and seconds of a row."""


def attempt(
    root: Path,
    stage: str,
    number: int,
    run_id: str,
    *uses: Use,
    begin: float | None = None,
    resumed: int = 0,
    code: int | None = None,
    message: str = "",
    fingerprint: str = "f",
    world_size: int = 1,
) -> Process:
    """An attempt that went on from step `resumed`, and ended with `code`, or was killed; each begins 100 s after the
    one of the number before, unless told when.
    """
    begin = 100.0 * number if begin is None else begin
    process = Process(root, stage, number, run_id, begin, fingerprint, world_size)
    if resumed:
        process.event("resume", fingerprint, step=resumed)
    for phase, step, seconds in uses:
        process.use(phase, step, seconds)
    if code is not None:
        last = max((step for _, step, _ in uses), default=0)
        process.event("end", fingerprint, step=last, exit_code=code, message=message)
    return process


def steps(phase: str, first: int, last: int, seconds: float = 10.0) -> list[Use]:
    return [(phase, step, seconds) for step in range(first, last + 1)]


def done_attempt(
    root: Path, stage: str, number: int, run_id: str, begin: float = 0.0, seconds: float = 10.0, **values: Any
) -> None:
    attempt(root, stage, number, run_id, ("train", 1, seconds), begin=begin, code=0, **values)


def test_an_attempt_killed_before_its_first_usage_row_has_no_length(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    Process(tmp_path, "sft", 1, "a", 100.0)
    (stage,) = read_ledger(tmp_path, params).stages
    assert (stage.seconds, stage.usd, stage.attempts, stage.phases) == (0.0, 0.0, 1, ())


def test_attempts_are_in_the_order_in_which_they_came_where_the_clock_was_set_back(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "sft", 1, "a", *steps("train", 1, 3, 3.0), begin=90000.0)
    attempt(tmp_path, "sft", 2, "a", *steps("train", 2, 3, 3.0), begin=100.0, resumed=1, code=0)
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(6.0)


def test_a_stop_that_was_resumed_under_another_run_keeps_each_run_its_own_bill(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "ppo", 1, "a", *steps("update", 1, 2), code=75, message="budget")
    pipeline(tmp_path, "a", "end", state="stopped")
    before = read_ledger(tmp_path, params).stages[0]
    assert (before.state, before.message, before.waste_usd, before.attempt) == ("stopped", "budget", 0.0, None)
    pipeline(tmp_path, "b", "start")
    attempt(tmp_path, "ppo", 2, "b", ("update", 3, 10.0), resumed=2, code=0)
    pipeline(tmp_path, "b", "stage", stage="ppo", attempt=2)
    pipeline(tmp_path, "c", "start")
    pipeline(tmp_path, "c", "stage", stage="ppo", cached=True, attempt=2)
    assert read_ledger(tmp_path, params, "a").total_usd == pytest.approx(0.020)
    assert read_ledger(tmp_path, params, "a").waste_usd == 0.0
    assert read_ledger(tmp_path, params, "b").total_usd == pytest.approx(0.010)
    assert read_ledger(tmp_path, params, "c").saved_usd == pytest.approx(0.030)


def test_a_crash_without_checkpoint_is_all_waste_once_it_was_done_again(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "sft", 1, "a", ("train", 1, 10.0), code=1, message="ValueError")
    assert read_ledger(tmp_path, params).waste_usd == 0.0
    done_attempt(tmp_path, "sft", 2, "a", begin=200.0)
    assert read_ledger(tmp_path, params).waste_usd == pytest.approx(0.010)


def test_a_checkpoint_is_inherited_past_an_attempt_with_other_parameters(tmp_path: Path) -> None:
    attempt(tmp_path, "sft", 1, "a", ("train", 1, 10.0), fingerprint="one")
    done_attempt(tmp_path, "sft", 2, "b", begin=200.0, fingerprint="two")
    attempts, _ = read_attempts(tmp_path / "runs" / "sft")
    assert split_usage(attempts[0], attempts[1:])[0] == []
    attempt(tmp_path, "sft", 3, "c", resumed=1, fingerprint="one")
    attempts, _ = read_attempts(tmp_path / "runs" / "sft")
    useful, redone = split_usage(attempts[0], attempts[1:])
    assert [row.seconds for row in useful] == [10.0]
    assert redone == []


def test_a_damaged_checkpoint_makes_more_of_the_earlier_work_waste(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "sft", 1, "a", *steps("train", 1, 4))
    for number, resumed in ((2, 3), (3, 1)):
        attempt(tmp_path, "sft", number, "a", ("train", 4, 10.0), resumed=resumed)
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(30 + 10)


def test_memory_that_ran_out_in_a_step_done_again_is_wasted_once(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    killed = Process(tmp_path, "sft", 1, "a", 0.0)
    killed.use("train", 1, 10.0)
    killed.clock += 5.0
    killed.event("retry", step=1, lost_seconds=5.0)  # in no phase: of the row `other`
    killed.clock += 1.0
    killed.use("train", 2, 10.0)
    killed.use("train", 3, 10.0)
    attempt(tmp_path, "sft", 2, "a", ("train", 3, 10.0), resumed=2, code=0)
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.seconds == pytest.approx(36 + 10)
    assert stage.waste_seconds == pytest.approx(6 + 10)
    assert sum(phase.seconds for phase in stage.useful_phases) == pytest.approx(20 + 10)


@pytest.mark.parametrize("exit_code", [None, 2])
def test_an_attempt_that_did_nothing_wastes_nobodys_work(
    tmp_path: Path, params: Params, exit_code: int | None
) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "ppo", 1, "a", ("update", 1, 10.0))
    # killed while loading, or it had to ask
    attempt(tmp_path, "ppo", 2, "a", ("start", 0, 3.0), code=exit_code)
    assert read_ledger(tmp_path, params).waste_usd == 0.0
    attempt(tmp_path, "ppo", 3, "a", ("update", 2, 10.0), resumed=1, code=0)
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(3)
    assert sum(phase.seconds for phase in stage.useful_phases) == pytest.approx(20)


def test_work_whose_heir_was_abandoned_was_abandoned_too(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    attempt(tmp_path, "ppo", 1, "a", ("update", 1, 10.0), fingerprint="one")
    attempt(tmp_path, "ppo", 2, "a", ("update", 2, 10.0), resumed=1, fingerprint="one")
    done_attempt(tmp_path, "ppo", 3, "a", begin=300.0, seconds=7.0, fingerprint="two")
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(20)
    assert sum(phase.seconds for phase in stage.useful_phases) == pytest.approx(7)


SECONDS = st.floats(0.01, 100)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("fg"),
            st.integers(0, 3),  # steps that it goes back
            st.lists(st.tuples(SECONDS, SECONDS, st.booleans()), max_size=4),
            st.sampled_from([None, 1, 75]),
        ),
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_what_made_the_outputs_and_the_waste_are_all_that_was_paid(
    attempts: list[tuple[str, int, list[tuple[float, float, bool]], int | None]], devices: int
) -> None:
    params = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=3.6"])
    reached = {"f": 0, "g": 0}
    with TemporaryDirectory() as folder:
        root = Path(folder)
        pipeline(root, "a", "start")
        for number, (fingerprint, back, steps, code) in enumerate(
            [*attempts, ("f", 0, [(1.0, 1.0, False)], 0)], start=1
        ):
            process = Process(root, "ppo", number, "a", 10_000.0 * number, fingerprint, devices)
            process.use("start", 0, 1.0)
            done = max(0, reached[fingerprint] - back)
            if done:
                process.event("resume", fingerprint, step=done)
            for step, (lost, seconds, fails) in enumerate(steps, start=done + 1):
                if fails:
                    process.out_of_memory("update", step, lost, seconds)
                else:
                    process.use("update", step, seconds)
                done = step
            reached[fingerprint] = done
            if code is not None:
                process.event("end", fingerprint, step=done, exit_code=code)
        (stage,) = read_ledger(root, params).stages
    result = sum(phase.seconds for phase in stage.useful_phases)
    assert result + stage.waste_seconds == pytest.approx(stage.seconds)
    assert sum(phase.usd for phase in stage.useful_phases) + stage.waste_usd == pytest.approx(stage.usd)
    assert sum(phase.usd for phase in stage.phases) == pytest.approx(stage.usd)


def test_rows_cut_by_a_crash_or_without_sense_are_counted_not_summed(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    process.use("train", 1, 10.0)
    process.event("end", exit_code=0)
    with (tmp_path / "runs" / "sft" / "usage.jsonl").open("ab") as file:
        file.write(b'{"time": 3, "run_')
    process.use("train", 2, -5.0)
    endless = '{"time":9,"run_id":"a","attempt":1,"step":3,"phase":"train","seconds":Infinity,'
    with (tmp_path / "runs" / "sft" / "usage.jsonl").open("a") as lines:
        lines.write(endless + '"tokens":0,"sequences":0,"peak_bytes":0,"device":"cpu","world_size":1}\n')
    result = read_ledger(tmp_path, params)
    assert result.skipped_rows == 3
    assert result.total_seconds == 10.0


def test_without_a_pipeline_run_the_newest_attempt_of_every_stage_counts(tmp_path: Path, params: Params) -> None:
    done_attempt(tmp_path, "sft", 1, "manual", seconds=10.0)
    done_attempt(tmp_path, "sft", 2, "manual", begin=20.0, seconds=7.0)
    done_attempt(tmp_path, "reward", 1, "manual", seconds=3.0)
    result = read_ledger(tmp_path, params)
    assert (result.run_id, result.state) == ("manual", "manual")
    assert [(stage.stage, stage.seconds) for stage in result.stages] == [("sft", 7.0), ("reward", 3.0)]


def test_an_unknown_run_names_the_known_ones(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    with pytest.raises(CostError, match=r"'nope'.*a"):
        read_ledger(tmp_path, params, "nope")


def test_nothing_recorded_is_a_plain_error(tmp_path: Path, params: Params) -> None:
    with pytest.raises(CostError, match="rlhf run"):
        read_ledger(tmp_path, params)


def test_an_attempt_without_a_step_has_no_peak_and_its_retries_are_those_rows_alone(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    process.event("retry", message="2", lost_seconds=0.0)
    stage = read_ledger(tmp_path, params).stages[0]
    assert (stage.peak_bytes, stage.memory_retries, stage.seconds) == (0, 1, 0.0)


def test_what_rows_do_not_say_of_an_attempt_is_empty(tmp_path: Path) -> None:
    process = Process(tmp_path, "sft", 1, "a", 0.0, fingerprint="")
    process.use("train", 1, 1.0)
    for name in ("attempts", "usage"):
        path = process.folder / f"{name}.jsonl"
        text = path.read_text()
        if name == "attempts":
            text = text.replace('"device":"cpu"', '"device":""')
        path.write_text(text)
    (attempt,), _ = read_attempts(process.folder)
    assert (attempt.fingerprint, attempt.device) == ("", "cpu")


def test_an_attempt_after_the_one_that_made_the_outputs_has_no_part_in_them(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    done_attempt(tmp_path, "sft", 1, "a", seconds=20.0)
    pipeline(tmp_path, "a", "stage", stage="sft", attempt=1)
    attempt(tmp_path, "sft", 2, "b", ("train", 1, 7.0))
    pipeline(tmp_path, "c", "start")
    pipeline(tmp_path, "c", "stage", stage="sft", cached=True, attempt=1)
    (stage,) = read_ledger(tmp_path, params, "c").stages
    assert (stage.attempt, stage.saved_seconds) == (1, 20.0)


# ---------------------------------------------------------------- every field of an attempt, a stage and a phase


def test_an_attempt_is_what_its_rows_say(tmp_path: Path) -> None:
    process = Process(tmp_path, "sft", 3, "a", 100.0, fingerprint="", world_size=2)
    process.event("resume", fingerprint="g", step=4)
    process.event("retry", fingerprint="h", step=4, lost_seconds=1.0)
    process.use("train", 5, 10.0)
    process.event("end", step=5, exit_code=75, message="stopped by hand")
    process.event("end", step=6, exit_code=0, message="a second end")
    (result,), skipped = read_attempts(process.folder)
    assert (result.number, result.run_id, result.world_size, result.device) == (3, "a", 2, "cpu")
    assert (result.fingerprint, result.resumed_step) == ("g", 4)
    assert (result.exit_code, result.message) == (75, "stopped by hand")
    assert (result.begin, result.last, skipped) == (100.0, 110.0, 0)
    assert [row.seconds for row in result.usage] == [10.0]
    assert [row.event for row in result.retries] == ["retry"]


def test_rows_of_usage_alone_make_an_attempt_too(tmp_path: Path) -> None:
    process = Process(tmp_path, "sft", 1, "a", 100.0, world_size=2)
    process.use("train", 2, 10.0)
    process.clock += 4.0
    process.use("train", 3, 10.0)
    (process.folder / "attempts.jsonl").unlink()
    (result,), _ = read_attempts(process.folder)
    assert (result.number, result.run_id, result.device, result.world_size) == (1, "a", "cpu", 2)
    assert (result.begin, result.last, result.exit_code) == (100.0, 124.0, None)
    assert (result.fingerprint, result.message, result.resumed_step) == ("", "", 0)
    other = result.usage[-1]
    assert (other.phase, other.seconds, other.step, other.time) == ("other", 4.0, 3, 124.0)
    assert (other.run_id, other.attempt, other.device, other.world_size) == ("a", 1, "cpu", 2)
    assert (other.tokens, other.sequences, other.peak_bytes) == (0, 0, 0)


def test_attempts_are_told_apart_by_number_and_run(tmp_path: Path) -> None:
    for number, run_id in ((1, "a"), (1, "b"), (2, "b")):
        done_attempt(tmp_path, "sft", number, run_id)
    result, _ = read_attempts(tmp_path / "runs" / "sft")
    assert [(item.number, item.run_id, len(item.usage)) for item in result] == [(1, "a", 1), (1, "b", 1), (2, "b", 1)]


@pytest.mark.parametrize("ended", [True, False])
def test_time_outside_of_all_phases_is_missing_only_where_nothing_says_the_end(tmp_path: Path, ended: bool) -> None:
    process = Process(tmp_path, "sft", 1, "a", 100.0)
    process.use("train", 1, 10.0)
    process.clock += 5.0
    if ended:
        process.event("end", exit_code=0)
    else:
        process.event("lost")
    (result,), _ = read_attempts(process.folder)
    assert [row.seconds for row in result.usage] == ([10.0] if ended else [10.0, 5.0])


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (75, "stopped"), (1, "failed"), (None, "unfinished")])
def test_the_exit_code_tells_how_an_attempt_ended(tmp_path: Path, code: int | None, state: str) -> None:
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    if code is not None:
        process.event("end", exit_code=code)
    (result,), _ = read_attempts(process.folder)
    assert (result.state, result.done) == (state, code == 0)


@pytest.mark.parametrize(
    ("rows", "resumed", "code", "worked"),
    [
        ([("start", 0)], 0, None, False),
        ([("start", 0), ("other", 0)], 0, None, False),
        ([("start", 1)], 0, None, True),
        ([("read", 0)], 0, None, True),
        ([("start", 0)], 1, None, True),
        ([], 0, 0, True),
        ([], 0, 1, False),
    ],
)
def test_an_attempt_has_worked_if_it_came_further_than_its_start(
    tmp_path: Path, rows: list[tuple[str, int]], resumed: int, code: int | None, worked: bool
) -> None:
    uses = [(phase, step, 1.0) for phase, step in rows]
    process = attempt(tmp_path, "sft", 1, "a", *uses, resumed=resumed, code=code)
    (result,), _ = read_attempts(process.folder)
    assert result.worked is worked


def test_work_stands_up_to_the_earliest_step_that_was_resumed_from(tmp_path: Path) -> None:
    def attempts(*later: tuple[str, int, int | None]) -> list[Attempt]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for number, (name, resumed, code) in enumerate([("f", 0, None), *later], start=1):
            use = ("train", resumed + 1, 1.0)
            attempt(folder, "sft", number, "a", use, resumed=resumed, code=code, fingerprint=name)
        return read_attempts(folder / "runs" / "sft")[0]

    def kept(*later: tuple[str, int, int | None]) -> float:
        first, *others = attempts(*later)
        return kept_step(first, others)

    assert kept() == math.inf
    assert kept(("f", 5, 0)) == 5
    assert kept(("f", 5, None), ("f", 3, 0)) == 3
    # what came after it was done does not count
    assert kept(("f", 5, 0), ("f", 3, 0)) == 5
    assert kept(("g", 0, 0)) == 0
    assert kept(("f", 5, 0), ("g", 0, 0)) == 5
    assert kept(("f", 5, 1), ("g", 0, 0)) == 0
    assert kept(("g", 0, 0), ("f", 5, 1)) == 5
    assert kept(("", 2, 0)) == 2  # killed before it knew its parameters
    (done, *after) = attempts(("f", 1, 0))[1:]
    assert kept_step(done, after) == math.inf


def test_memory_that_ran_out_is_lost_in_the_phase_of_that_moment_alone(tmp_path: Path) -> None:
    process = Process(tmp_path, "ppo", 1, "a", 0.0)
    process.use("rollout", 1, 10.0)
    process.event("retry", step=0, lost_seconds=2.0)  # at 10, where one phase ends
    process.use("update", 1, 10.0)
    process.clock = 15.0
    process.event("retry", step=0, lost_seconds=1.0)
    process.event("retry", step=0, lost_seconds=3.0)
    process.clock = 20.0
    process.event("end", exit_code=0)
    (result,), _ = read_attempts(process.folder)
    useful, redone = split_usage(result, [])
    assert [(row.phase, row.seconds) for row in useful] == [("rollout", 8.0), ("update", 6.0)]
    assert [(row.phase, row.seconds) for row in redone] == [("rollout", 2.0), ("update", 4.0)]
    assert [(row.tokens, row.sequences) for row in redone] == [(0, 0), (0, 0)]


def test_no_more_is_lost_than_the_row_took(tmp_path: Path) -> None:
    process = Process(tmp_path, "ppo", 1, "a", 0.0)
    process.use("update", 1, 10.0, tokens=7)
    process.clock = 5.0
    process.event("retry", lost_seconds=99.0)
    process.event("end", exit_code=0)
    (result,), _ = read_attempts(process.folder)
    useful, redone = split_usage(result, [])
    assert [(row.seconds, row.tokens) for row in useful] == [(0.0, 7)]
    assert [row.seconds for row in redone] == [10.0]


@pytest.mark.parametrize(
    ("values", "state", "attempt"),
    [
        ({"cached": True, "attempt": 7}, "cached", 7),
        ({"cached": True}, "cached", None),
        ({"attempt": 1}, "failed", 1),
        ({"attempt": 1, "state": "stopped"}, "stopped", 1),
    ],
)
def test_a_stage_without_rows_of_its_own_is_what_the_run_says_of_it(
    tmp_path: Path, params: Params, values: dict[str, Any], state: str, attempt: int | None
) -> None:
    done_attempt(tmp_path, "sft", 1, "old", seconds=3.0)
    pipeline(tmp_path, "b", "start")
    pipeline(tmp_path, "b", "stage", stage="sft", **values)
    (stage,) = read_ledger(tmp_path, params).stages
    assert (stage.state, stage.attempt, stage.message) == (state, attempt, "")
    assert (stage.device, stage.world_size, stage.useful_phases) == ("", 1, ())
    assert (stage.saved_seconds, stage.saved_usd) == (0.0, 0.0)


def test_outputs_of_a_number_that_was_used_twice_are_the_newest(tmp_path: Path, params: Params) -> None:
    done_attempt(tmp_path, "sft", 1, "old", seconds=3.0)
    done_attempt(tmp_path, "sft", 1, "older checkout", begin=50.0, seconds=5.0)
    pipeline(tmp_path, "b", "start")
    pipeline(tmp_path, "b", "stage", stage="sft", cached=True, attempt=1)
    (stage,) = read_ledger(tmp_path, params).stages
    assert stage.saved_seconds == 5.0


def test_an_attempt_that_went_on_from_a_done_one_has_it_among_its_makers(tmp_path: Path, params: Params) -> None:
    """It found outputs that had to be finished: more epochs of the same."""
    done_attempt(tmp_path, "sft", 1, "a")
    attempt(tmp_path, "sft", 2, "b", ("train", 2, 4.0), resumed=1, code=0)
    attempt(tmp_path, "sft", 3, "b", ("train", 2, 2.0), resumed=1, code=0, fingerprint="g")
    pipeline(tmp_path, "c", "start")
    pipeline(tmp_path, "c", "stage", stage="sft", cached=True, attempt=2)
    pipeline(tmp_path, "d", "start")
    pipeline(tmp_path, "d", "stage", stage="sft", cached=True, attempt=3)
    assert read_ledger(tmp_path, params, "c").stages[0].saved_seconds == 14.0
    assert read_ledger(tmp_path, params, "d").stages[0].saved_seconds == 2.0


def test_the_last_that_a_run_says_of_a_stage_holds(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    pipeline(tmp_path, "a", "stage", stage="sft", state="failed")
    pipeline(tmp_path, "a", "stage", stage="sft", cached=True)
    pipeline(tmp_path, "a", "stage", stage="reward", state="stopped")
    assert [stage.state for stage in read_ledger(tmp_path, params).stages] == ["cached", "stopped"]


@pytest.mark.parametrize("at_work", [True, False])
def test_what_is_unfinished_runs_while_its_run_is_at_work(tmp_path: Path, params: Params, at_work: bool) -> None:
    pipeline(tmp_path, "old", "start", time=1.0)
    pipeline(tmp_path, "a", "start", time=2.0)
    done_attempt(tmp_path, "data", 1, "a")
    Process(tmp_path, "sft", 1, "a", 50.0).use("train", 1, 1.0)
    if at_work:
        with locked(tmp_path):
            result, old = read_ledger(tmp_path, params), read_ledger(tmp_path, params, "old")
    else:
        result, old = read_ledger(tmp_path, params), read_ledger(tmp_path, params, "old")
    state = "running" if at_work else "unfinished"
    assert (result.state, [stage.state for stage in result.stages]) == (state, ["done", state])
    assert (old.state, result.finished) == ("unfinished", None)


def test_known_runs_are_named_newest_first(tmp_path: Path, params: Params) -> None:
    for run_id in ("a", "b", "a"):
        pipeline(tmp_path, run_id, "start")
    with pytest.raises(CostError, match=r"\(newest first\): a, b\."):
        read_ledger(tmp_path, params, "nope")
    with pytest.raises(CostError, match=r"\(newest first\): none\."):
        read_ledger(tmp_path / "elsewhere", params, "nope")


@pytest.mark.parametrize("counts", [False, True])
def test_time_outside_of_stages_has_a_line_and_a_price_if_it_counts(
    tmp_path: Path, params: Params, counts: bool
) -> None:
    pipeline(tmp_path, "run", "start", 135.0, detail={"began": 100.0})
    process = Process(tmp_path, "sft", 1, "run", 140.0)
    process.use("train", 1, 40.0)
    process.event("end", exit_code=0)
    pipeline(tmp_path, "run", "stage", 181.0, stage="sft", attempt=1)
    pipeline(tmp_path, "run", "end", 185.0, state="completed")
    jsonl.append(tmp_path / "runs" / "pipeline.jsonl", PipelineRow(time=195.0, run_id="run", event="left"))
    prices = params.prices.model_copy(update={"outside_stages": counts})
    params = params.model_copy(update={"prices": prices})
    ledger = read_ledger(tmp_path, params, "run")
    assert (ledger.outside_seconds, ledger.finished) == (pytest.approx(55.0), 185.0)  # of 95
    assert ledger.outside_usd == pytest.approx(0.055 if counts else 0.0)
    assert ledger.total_usd == pytest.approx(0.095 if counts else 0.040)
    assert ledger.total_seconds == pytest.approx(40.0)
    spent = total(spent_by_stage(tmp_path, params, ["run"]))
    assert spent == (pytest.approx(ledger.total_usd), pytest.approx(40.0))
    assert sum(item.usd for item in expenses_of(tmp_path, params, "1970-01")) == pytest.approx(ledger.total_usd)


def test_groups_without_a_difference_are_priced_by_what_was_for_their_replies(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "run", 100.0)
    clock.pipeline("start")
    clock.attempt("grpo", 1, "start")
    for step, share in ((1, 0.25), (2, 0.5)):
        for phase in ("rollout", "score", "reference", "update"):
            clock.use("grpo", 1, phase, step, 10.0)
        clock.log("grpo", 1, step, equal_groups=share, equal_groups_taken=share / 2)
    clock.log("grpo", 7, 1, equal_groups=1.0)  # of another attempt
    clock.done("grpo", 1, 2)
    ledger = read_ledger(tmp_path, params, "run")
    # 10 s a phase at 0.001 USD a second; the reference has read those alone that were taken
    assert ledger.taught_nothing_usd == pytest.approx((0.020 + 0.010 / 2) * (0.25 + 0.5))
    assert ledger.as_dict()["taught_nothing_usd"] == ledger.taught_nothing_usd
    assert ledger.as_dict()["stages"][0]["taught_nothing_usd"] == ledger.taught_nothing_usd
    assert ledger.total_usd == pytest.approx(0.080)
