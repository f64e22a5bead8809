import pytest

from benchmarks import rollout_cost
from benchmarks.rollout_cost import LIMIT, cpu_seconds, measure, model_of, work_of


@pytest.mark.parametrize("engine", ["static", "paged"])
def test_responses_end_where_they_are_to_whatever_the_limit(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, work = model_of("2M", 512, None), work_of(6, 512)
    assert 6 * 15 < work.tokens < 6 * 45
    for limit in (LIMIT, 2 * LIMIT):
        assert cpu_seconds(engine, model, work, limit) > 0
    with pytest.raises(SystemExit, match="tokens where"):
        cpu_seconds(engine, model, work, 10)


def test_a_measurement_is_the_median_of_pairs_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rollout_cost.SIZES, "2M", rollout_cost.SIZES["2M"]._replace(batch_size=4))
    asked, seconds = [], iter([99.0, 2.0, 3.0, 4.0, 2.0, 5.0, 10.0])

    def cpu_seconds(engine: str, model: object, work: object, limit: int) -> float:
        asked.append((engine, limit))
        return next(seconds)

    monkeypatch.setattr(rollout_cost, "cpu_seconds", cpu_seconds)
    found = measure("2M", "static", 3, 512, None)
    assert asked == [("static", limit) for limit in (LIMIT, *[LIMIT, 2 * LIMIT] * 3)]
    assert (found["responses"], found["doubled_limit_ratio"]) == (4, 1.5)
    assert found["microseconds_per_token"] == pytest.approx(4e6 / work_of(4, 512).tokens)
