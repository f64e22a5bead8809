import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.jsonl import Follower
from config.records import MetricRow


def row(step: int) -> MetricRow:
    return MetricRow(time=float(step), run_id="r", attempt=1, step=step, values={"loss": step / 2})


def test_a_line_cut_by_a_crash_is_skipped_and_the_next_row_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    jsonl.append(path, row(1))
    with path.open("ab") as file:
        file.write(b'{"time": 2.0, "run_')
    jsonl.append(path, row(3))
    rows = jsonl.read(path, MetricRow)
    assert ([row.step for row in rows.rows], rows.skipped) == ([1, 3], 1)


def test_a_row_with_values_that_are_no_numbers_is_whole_and_every_program_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {"loss": math.nan, "ratio": math.inf, "score": -math.inf, "kl": 0.5}
    jsonl.append(path, MetricRow(time=1.0, run_id="r", attempt=1, step=1, values=values))
    (result,), skipped = jsonl.read(path, MetricRow)
    (followed,) = Follower(path).read(MetricRow)
    assert skipped == 0
    for row_read in (result, followed):
        assert math.isnan(row_read.values["loss"])
        assert {name: row_read.values[name] for name in ("ratio", "score", "kl")} == {
            "ratio": math.inf,
            "score": -math.inf,
            "kl": 0.5,
        }

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["values"]["ratio"] == "Infinity"


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert jsonl.read(tmp_path / "no.jsonl", MetricRow) == ([], 0)
    assert list(Follower(tmp_path / "no.jsonl").read(MetricRow)) == []


@given(cuts=st.lists(st.integers(min_value=0, max_value=400), max_size=6))
def test_a_follower_reads_every_row_once_however_the_file_grows(tmp_path_factory: object, cuts: list[int]) -> None:
    folder = tmp_path_factory.mktemp("follow")  # type: ignore[attr-defined]
    whole = b"".join(row(step).model_dump_json().encode() + b"\n" for step in range(5))
    path, follower, steps = folder / "m.jsonl", Follower(folder / "m.jsonl"), []
    for end in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        path.write_bytes(whole[:end])
        steps += [result.step for result in follower.read(MetricRow)]
    assert steps == [0, 1, 2, 3, 4]
    assert follower.offset == len(whole)


def test_a_follower_goes_on_where_another_stopped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for step in (1, 2):
        jsonl.append(path, row(step))
    first = Follower(path)
    assert [result.step for result in first.read(MetricRow)] == [1, 2]
    jsonl.append(path, row(3))
    assert [result.step for result in Follower(path, first.offset).read(MetricRow)] == [3]
