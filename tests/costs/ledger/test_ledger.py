"""The measured ledger against sums done by hand. Price in all of them: 3.6 USD per device hour, so
one device second is 0.001 USD.
"""

import json
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
from costs.ledger.attempts import read_attempts, split_usage
from costs.ledger.ledger import ledger, usd_of, usd_per_win_rate_point

ROOT = Path(__file__).parents[3]


@pytest.fixture
def params() -> Params:
    return load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=3.6"])


def pipeline(
    root: Path,
    run_id: str,
    event: Literal["start", "stage", "end"],
    time: float = 0.0,
    **values: Any,
) -> None:
    jsonl.append(
        root / "runs" / "pipeline.jsonl",
        PipelineRow(time=time, run_id=run_id, event=event, **values),
    )


class Process:
    """Writes the rows of one attempt as a stage process would; each phase follows the one before it
    without a gap.
    """

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
        self.common: dict[str, Any] = {
            "run_id": run_id,
            "attempt": number,
            "device": "cpu",
            "world_size": world_size,
        }
        self.event("start", fingerprint=fingerprint)

    def event(
        self,
        event: Literal["start", "resume", "retry", "end", "lost"],
        fingerprint: str = "f",
        step: int = 0,
        **values: Any,
    ) -> None:
        row = AttemptRow(
            time=self.clock,
            event=event,
            fingerprint=fingerprint,
            pid=1,
            step=step,
            **self.common,
            **values,
        )
        jsonl.append(self.folder / "attempts.jsonl", row)

    def use(
        self, phase: str, step: int, seconds: float, tokens: int = 0, peak_bytes: int = 0
    ) -> None:
        self.clock += seconds
        row = UsageRow(
            time=self.clock,
            step=step,
            phase=phase,
            seconds=seconds,
            tokens=tokens,
            sequences=1,
            peak_bytes=peak_bytes,
            **self.common,
        )
        jsonl.append(self.folder / "usage.jsonl", row)

    def out_of_memory(self, phase: str, step: int, lost: float, seconds: float) -> None:
        """A phase that took `lost` before memory ran out in it, and `seconds` in smaller pieces."""
        self.clock += lost
        self.event("retry", step=step - 1, lost_seconds=lost)
        self.clock -= lost
        self.use(phase, step, lost + seconds)


def done_attempt(
    root: Path,
    stage: str,
    number: int,
    run_id: str,
    begin: float = 0.0,
    seconds: float = 10.0,
    **values: Any,
) -> None:
    process = Process(root, stage, number, run_id, begin, **values)
    process.use("train", 1, seconds)
    process.event("end", step=1, exit_code=0)


def test_one_device_second_costs_a_3600th_of_the_hourly_price() -> None:
    assert usd_of(1.0, 3.6) == pytest.approx(0.001)


def test_phases_add_up_to_stages_and_stages_to_the_total(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    for stage, train_seconds in (("data", 2.0), ("sft", 30.1)):
        process = Process(tmp_path, stage, 1, "a", 0.0)
        process.use("start", 0, 5.0)
        process.use("train", 1, train_seconds, tokens=100, peak_bytes=7)
        process.use("train", 2, train_seconds, tokens=50, peak_bytes=9)
        process.event("end", exit_code=0)
        pipeline(tmp_path, "a", "stage", stage=stage, attempt=1)
    pipeline(tmp_path, "a", "end", time=99.0, state="completed")
    result = ledger(tmp_path, params)
    data, sft = result.stages
    assert [
        (phase.phase, phase.tokens, phase.sequences, phase.peak_bytes) for phase in sft.phases
    ] == [
        ("start", 0, 1, 0),
        ("train", 150, 2, 9),
    ]
    assert data.seconds == pytest.approx(9.0)
    assert sft.seconds == pytest.approx(65.2)
    assert sft.usd == pytest.approx(0.0652)
    assert result.total_usd == data.usd + sft.usd
    assert result.total_seconds == data.seconds + sft.seconds
    assert (result.run_id, result.state, result.finished, result.skipped_rows) == (
        "a",
        "completed",
        99.0,
        0,
    )


def test_every_device_of_a_stage_is_paid(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    done_attempt(tmp_path, "sft", 1, "a", seconds=10.0, world_size=4)
    (stage,) = ledger(tmp_path, params).stages
    assert (stage.seconds, stage.device_seconds, stage.world_size) == (10.0, 40.0, 4)
    assert stage.usd == pytest.approx(0.040)


def test_a_cached_stage_costs_nothing_and_shows_what_it_saved(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    done_attempt(tmp_path, "sft", 1, "a", seconds=20.0)
    pipeline(tmp_path, "a", "stage", stage="sft", attempt=1)
    pipeline(tmp_path, "b", "start")
    pipeline(tmp_path, "b", "stage", stage="sft", cached=True, attempt=1)
    first, second = ledger(tmp_path, params, "a").stages[0], ledger(tmp_path, params).stages[0]
    assert (first.cached, second.cached) == (False, True)
    assert (first.attempt, second.attempt) == (1, 1)
    assert (second.seconds, second.usd, second.attempts, second.phases) == (0.0, 0.0, 0, ())
    assert second.saved_usd == pytest.approx(0.020)
    assert second.saved_seconds == 20.0
    assert first.usd == pytest.approx(0.020)
    assert first.saved_usd == 0.0


def test_a_killed_attempt_lasts_to_its_last_row_and_its_unaccounted_time_is_other(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 100.0)
    process.use("train", 1, 3.0)
    process.clock += 2.5
    process.use("train", 2, 4.0)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.seconds == pytest.approx(9.5)
    assert {phase.phase: phase.seconds for phase in stage.phases} == pytest.approx(
        {"train": 7.0, "other": 2.5}
    )
    assert stage.state == "unfinished"
    assert stage.failed_attempts == 1


def test_an_attempt_killed_before_its_first_usage_row_has_no_length(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    Process(tmp_path, "sft", 1, "a", 100.0)
    (stage,) = ledger(tmp_path, params).stages
    assert (stage.seconds, stage.usd, stage.attempts, stage.phases) == (0.0, 0.0, 1, ())


def test_a_lost_process_is_paid_for_as_long_as_its_parent_saw_it(
    tmp_path: Path, params: Params
) -> None:
    """The clock was put forward by a day while it was at work."""
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 100.0)
    process.use("train", 1, 3.0)
    process.clock += 86400.0
    process.use("train", 2, 4.0)
    process.event("lost", lived_seconds=8.5)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.seconds == pytest.approx(8.5)


def test_attempts_are_in_the_order_in_which_they_came_where_the_clock_was_set_back(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    killed = Process(tmp_path, "sft", 1, "a", 90000.0)
    for step in (1, 2, 3):
        killed.use("train", step, 3.0)
    again = Process(tmp_path, "sft", 2, "a", 100.0)
    again.event("resume", step=1)
    again.use("train", 2, 3.0)
    again.use("train", 3, 3.0)
    again.event("end", step=3, exit_code=0)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(6.0)


def test_work_after_the_checkpoint_that_was_resumed_from_is_waste(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    killed = Process(tmp_path, "sft", 1, "a", 0.0)
    killed.use("start", 0, 1.0)
    for step in range(1, 6):
        killed.use("train", step, 10.0)
    heir = Process(tmp_path, "sft", 2, "a", 100.0)
    heir.event("resume", step=3)
    heir.use("start", 0, 1.0)
    for step in (4, 5):
        heir.use("train", step, 10.0)
    heir.event("end", exit_code=0, step=5)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.seconds == pytest.approx(51 + 21)
    assert stage.waste_seconds == pytest.approx(1 + 20)
    assert stage.waste_usd == pytest.approx(0.021)
    assert (stage.attempts, stage.failed_attempts, stage.state) == (2, 1, "done")


def test_a_stop_that_was_resumed_under_another_run_keeps_each_run_its_own_bill(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    stopped = Process(tmp_path, "ppo", 1, "a", 0.0)
    stopped.use("update", 1, 10.0)
    stopped.use("update", 2, 10.0)
    stopped.event("end", exit_code=75, step=2, message="budget")
    pipeline(tmp_path, "a", "end", state="stopped")
    before = ledger(tmp_path, params).stages[0]
    assert (before.state, before.message, before.waste_usd, before.attempt) == (
        "stopped",
        "budget",
        0.0,
        None,
    )
    pipeline(tmp_path, "b", "start")
    heir = Process(tmp_path, "ppo", 2, "b", 50.0)
    heir.event("resume", step=2)
    heir.use("update", 3, 10.0)
    heir.event("end", exit_code=0, step=3)
    pipeline(tmp_path, "b", "stage", stage="ppo", attempt=2)
    pipeline(tmp_path, "c", "start")
    pipeline(tmp_path, "c", "stage", stage="ppo", cached=True, attempt=2)
    assert ledger(tmp_path, params, "a").total_usd == pytest.approx(0.020)
    assert ledger(tmp_path, params, "a").waste_usd == 0.0
    assert ledger(tmp_path, params, "b").total_usd == pytest.approx(0.010)
    assert ledger(tmp_path, params, "c").saved_usd == pytest.approx(0.030)


def test_a_crash_without_checkpoint_is_all_waste_once_it_was_done_again(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    crashed = Process(tmp_path, "sft", 1, "a", 0.0)
    crashed.use("train", 1, 10.0)
    crashed.event("end", exit_code=1, message="ValueError")
    assert ledger(tmp_path, params).waste_usd == 0.0
    done_attempt(tmp_path, "sft", 2, "a", begin=20.0)
    assert ledger(tmp_path, params).waste_usd == pytest.approx(0.010)


def test_a_checkpoint_is_inherited_past_an_attempt_with_other_parameters(tmp_path: Path) -> None:
    first = Process(tmp_path, "sft", 1, "a", 0.0, fingerprint="one")
    first.use("train", 1, 10.0)
    done_attempt(tmp_path, "sft", 2, "b", begin=20.0, fingerprint="two")
    attempts, _ = read_attempts(tmp_path / "runs" / "sft")
    assert split_usage(attempts[0], attempts[1:])[0] == []
    heir = Process(tmp_path, "sft", 3, "c", 40.0, fingerprint="one")
    heir.event("resume", fingerprint="one", step=1)
    attempts, _ = read_attempts(tmp_path / "runs" / "sft")
    useful, redone = split_usage(attempts[0], attempts[1:])
    assert [row.seconds for row in useful] == [10.0]
    assert redone == []


def test_a_damaged_checkpoint_makes_more_of_the_earlier_work_waste(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    first = Process(tmp_path, "sft", 1, "a", 0.0)
    for step in (1, 2, 3, 4):
        first.use("train", step, 10.0)
    for number, resumed_step in ((2, 3), (3, 1)):
        heir = Process(tmp_path, "sft", number, "a", 100.0 * number)
        heir.event("resume", step=resumed_step)
        heir.use("train", 4, 10.0)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(30 + 10)


def test_a_step_done_again_in_smaller_pieces_is_waste_and_no_part_of_what_made_the_outputs(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "ppo", 1, "a", 0.0, world_size=2)
    process.use("update", 1, 10.0)
    process.out_of_memory("update", 2, 4.0, 10.0)
    process.event("end", step=2, exit_code=0)
    pipeline(tmp_path, "a", "stage", stage="ppo", attempt=1)
    pipeline(tmp_path, "b", "start")
    pipeline(tmp_path, "b", "stage", stage="ppo", cached=True, attempt=1)
    (stage,) = ledger(tmp_path, params, "a").stages
    assert (stage.seconds, stage.waste_seconds, stage.memory_retries) == pytest.approx((24, 4, 1))
    assert sum(phase.seconds for phase in stage.made) == pytest.approx(20)
    (reused,) = ledger(tmp_path, params, "b").stages
    assert reused.saved_seconds == pytest.approx(20)
    assert reused.saved_usd == pytest.approx(stage.usd - stage.waste_usd)


def test_memory_that_ran_out_in_a_step_done_again_is_wasted_once(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    killed = Process(tmp_path, "sft", 1, "a", 0.0)
    killed.use("train", 1, 10.0)
    killed.clock += 5.0
    killed.event("retry", step=1, lost_seconds=5.0)  # in no phase: of the row `other`
    killed.clock += 1.0
    killed.use("train", 2, 10.0)
    killed.use("train", 3, 10.0)
    heir = Process(tmp_path, "sft", 2, "a", 100.0)
    heir.event("resume", step=2)
    heir.use("train", 3, 10.0)
    heir.event("end", exit_code=0, step=3)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.seconds == pytest.approx(36 + 10)
    assert stage.waste_seconds == pytest.approx(6 + 10)
    assert sum(phase.seconds for phase in stage.made) == pytest.approx(20 + 10)


@pytest.mark.parametrize("exit_code", [None, 2])
def test_an_attempt_that_did_nothing_wastes_nobodys_work(
    tmp_path: Path, params: Params, exit_code: int | None
) -> None:
    pipeline(tmp_path, "a", "start")
    first = Process(tmp_path, "ppo", 1, "a", 0.0)
    first.use("update", 1, 10.0)
    ended = Process(tmp_path, "ppo", 2, "a", 20.0)  # killed while loading, or it had to ask
    ended.use("start", 0, 3.0)
    if exit_code is not None:
        ended.event("end", exit_code=exit_code)
    assert ledger(tmp_path, params).waste_usd == 0.0
    heir = Process(tmp_path, "ppo", 3, "a", 40.0)
    heir.event("resume", step=1)
    heir.use("update", 2, 10.0)
    heir.event("end", exit_code=0, step=2)
    (stage,) = ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(3)
    assert sum(phase.seconds for phase in stage.made) == pytest.approx(20)


def test_work_whose_heir_was_abandoned_was_abandoned_too(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    first = Process(tmp_path, "ppo", 1, "a", 0.0, fingerprint="one")
    first.use("update", 1, 10.0)
    second = Process(tmp_path, "ppo", 2, "a", 20.0, fingerprint="one")
    second.event("resume", fingerprint="one", step=1)
    second.use("update", 2, 10.0)
    done_attempt(tmp_path, "ppo", 3, "a", begin=40.0, seconds=7.0, fingerprint="two")
    (stage,) = ledger(tmp_path, params).stages
    assert stage.waste_seconds == pytest.approx(20)
    assert sum(phase.seconds for phase in stage.made) == pytest.approx(7)


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
        (stage,) = ledger(root, params).stages
    made = sum(phase.seconds for phase in stage.made)
    assert made + stage.waste_seconds == pytest.approx(stage.seconds)
    assert sum(phase.usd for phase in stage.made) + stage.waste_usd == pytest.approx(stage.usd)
    assert sum(phase.usd for phase in stage.phases) == pytest.approx(stage.usd)


def test_rows_cut_by_a_crash_or_without_sense_are_counted_not_summed(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    process.use("train", 1, 10.0)
    process.event("end", exit_code=0)
    with (tmp_path / "runs" / "sft" / "usage.jsonl").open("ab") as file:
        file.write(b'{"time": 3, "run_')
    process.use("train", 2, -5.0)
    endless = '{"time":9,"run_id":"a","attempt":1,"step":3,"phase":"train","seconds":Infinity,'
    with (tmp_path / "runs" / "sft" / "usage.jsonl").open("a") as lines:
        lines.write(
            endless + '"tokens":0,"sequences":0,"peak_bytes":0,"device":"cpu","world_size":1}\n'
        )
    result = ledger(tmp_path, params)
    assert result.skipped_rows == 3
    assert result.total_seconds == 10.0


def test_without_a_pipeline_run_the_newest_attempt_of_every_stage_counts(
    tmp_path: Path, params: Params
) -> None:
    done_attempt(tmp_path, "sft", 1, "manual", seconds=10.0)
    done_attempt(tmp_path, "sft", 2, "manual", begin=20.0, seconds=7.0)
    done_attempt(tmp_path, "reward", 1, "manual", seconds=3.0)
    result = ledger(tmp_path, params)
    assert (result.run_id, result.state) == ("manual", "manual")
    assert [(stage.stage, stage.seconds) for stage in result.stages] == [
        ("sft", 7.0),
        ("reward", 3.0),
    ]


def test_the_newest_pipeline_run_is_taken_and_stages_it_never_reached_are_absent(
    tmp_path: Path, params: Params
) -> None:
    for run_id in ("a", "b"):
        pipeline(tmp_path, run_id, "start")
    done_attempt(tmp_path, "ppo", 1, "a")
    done_attempt(tmp_path, "data", 1, "b", seconds=1.0)
    result = ledger(tmp_path, params)
    assert (result.run_id, [stage.stage for stage in result.stages]) == ("b", ["data"])
    assert result.stage("ppo") is None


def test_an_unknown_run_names_the_known_ones(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    with pytest.raises(CostError, match=r"'nope'.*a"):
        ledger(tmp_path, params, "nope")


def test_nothing_recorded_is_a_plain_error(tmp_path: Path, params: Params) -> None:
    with pytest.raises(CostError, match="rlhf run"):
        ledger(tmp_path, params)


def test_the_json_totals_are_exactly_the_sum_of_its_stages(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start")
    for i, stage in enumerate(("data", "sft", "reward", "ppo", "evaluate")):
        done_attempt(tmp_path, stage, 1, "a", seconds=0.1 + i / 7)
    printed = json.loads(json.dumps(ledger(tmp_path, params).as_dict()))
    assert printed["total_usd"] == sum(stage["usd"] for stage in printed["stages"]) > 0
    assert printed["total_seconds"] == sum(stage["seconds"] for stage in printed["stages"])
    assert all(
        stage["usd"] == sum(phase["usd"] for phase in stage["phases"])
        for stage in printed["stages"]
    )
    assert set(printed["stages"][0]["phases"][0]) >= {
        "phase",
        "seconds",
        "tokens",
        "usd",
        "peak_bytes",
    }


def test_each_stage_is_paid_for_at_the_price_of_its_work_pool(tmp_path: Path) -> None:
    params = load(
        ROOT / "recipes" / "demo.yaml",
        [
            "prices.usd_per_device_hour=3.6",
            "where.sft.pool=gpus",
            "prices.usd_per_device_hour_by_pool={gpus: 36.0}",
        ],
    )
    pipeline(tmp_path, "a", "start")
    for stage in ("data", "sft"):
        done_attempt(tmp_path, stage, 1, "a")
        pipeline(tmp_path, "a", "stage", stage=stage, attempt=1)
    data, sft = ledger(tmp_path, params).stages
    assert (data.usd, sft.usd) == (pytest.approx(0.01), pytest.approx(0.1))
    assert (data.usd_per_device_hour, sft.usd_per_device_hour) == (3.6, 36.0)


@pytest.mark.parametrize(
    ("made_usd", "win_rate", "wanted"),
    [(8.0, 0.7, 0.4), (8.0, 0.5, None), (8.0, 0.3, None), (8.0, None, None), (0.0, 0.7, None)],
)
def test_a_point_of_win_rate_costs_its_part_of_what_was_made(
    made_usd: float, win_rate: float | None, wanted: float | None
) -> None:
    found = usd_per_win_rate_point(made_usd, win_rate)
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_the_json_has_every_total_under_its_name(tmp_path: Path, params: Params) -> None:
    pipeline(tmp_path, "a", "start", time=1.0)
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    process.use("train", 1, 10.0)  # no checkpoint: done again by the next attempt
    done_attempt(tmp_path, "sft", 2, "a", begin=20.0, seconds=30.0)
    pipeline(tmp_path, "a", "end", time=60.0, state="completed")
    found = ledger(tmp_path, params).as_dict()
    stages = found.pop("stages")
    assert found == {
        "run_id": "a",
        "state": "completed",
        "started": 1.0,
        "finished": 60.0,
        "usd_per_device_hour": 3.6,
        "total_seconds": 40.0,
        "total_usd": pytest.approx(0.04),
        "waste_usd": pytest.approx(0.01),
        "saved_usd": 0.0,
        "skipped_rows": 0,
    }
    (stage,) = stages
    assert (stage["attempts"], stage["failed_attempts"], stage["waste_seconds"]) == (2, 1, 10.0)


def test_an_attempt_without_a_step_has_no_peak_and_its_retries_are_those_rows_alone(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    process = Process(tmp_path, "sft", 1, "a", 0.0)
    process.event("retry", message="2", lost_seconds=0.0)
    stage = ledger(tmp_path, params).stages[0]
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


def test_an_attempt_after_the_one_that_made_the_outputs_has_no_part_in_them(
    tmp_path: Path, params: Params
) -> None:
    pipeline(tmp_path, "a", "start")
    done_attempt(tmp_path, "sft", 1, "a", seconds=20.0)
    pipeline(tmp_path, "a", "stage", stage="sft", attempt=1)
    later = Process(tmp_path, "sft", 2, "b", 100.0)
    later.use("train", 1, 7.0)
    pipeline(tmp_path, "c", "start")
    pipeline(tmp_path, "c", "stage", stage="sft", cached=True, attempt=1)
    (stage,) = ledger(tmp_path, params, "c").stages
    assert (stage.attempt, stage.saved_seconds) == (1, 20.0)
