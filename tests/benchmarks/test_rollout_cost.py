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


def test_a_measurement_names_what_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rollout_cost.SIZES, "2M", rollout_cost.SIZES["2M"]._replace(batch_size=4))
    found = measure("2M", "static", 5, 512, 2)
    assert found["responses"] == 4
    assert 0.2 < float(str(found["doubled_limit_ratio"])) < 5
    assert float(str(found["microseconds_per_token"])) > 0
