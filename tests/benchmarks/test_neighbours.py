import pytest

from benchmarks.neighbours import DEFAULT, SPINNING, Took, environment, summary


def test_ratios_are_medians_of_those_within_a_round() -> None:
    found = {
        SPINNING: [
            (Took(10.0, 20.0), Took(40.0, 50.0)),
            (Took(20.0, 30.0), Took(60.0, 70.0)),
            (Took(10.0, 20.0), Took(25.0, 60.0)),
        ],
        DEFAULT: [
            (Took(11.0, 20.0), Took(22.0, 30.0)),
            (Took(21.0, 30.0), Took(42.0, 60.0)),
            (Took(12.0, 20.0), Took(18.0, 28.0)),
        ],
    }
    result = summary(found)
    assert result[SPINNING]["beside_ratio"] == 3.0
    assert result[DEFAULT]["beside_ratio"] == 2.0
    assert result[DEFAULT]["beside_process_ratio"] == 1.5
    assert result[DEFAULT]["alone_ratio"] == pytest.approx(1.1)
    assert result[DEFAULT]["alone_seconds"] == 12.0


def test_each_way_of_waiting_is_what_the_process_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment(DEFAULT))
    assert environment(SPINNING)["GOMP_SPINCOUNT"] == "300000"
    assert environment("1000")["GOMP_SPINCOUNT"] == "1000"
