import pytest

from config.records import MetricRow, UsageRow
from tracking.rows import final_metrics, flat_params, metric_name, training_metrics, usage_metrics

USAGE = UsageRow(
    time=1000.5,
    run_id="r",
    attempt=1,
    step=7,
    phase="rollout",
    seconds=36.0,
    tokens=900,
    sequences=12,
    peak_bytes=2048,
    device="cpu",
    world_size=2,
)


def test_a_phase_is_priced_by_its_seconds_on_all_devices() -> None:
    metrics = {metric.key: metric.value for metric in usage_metrics(USAGE, usd_per_device_hour=5.0)}
    assert metrics == {
        "phase/rollout/seconds": 36.0,
        "phase/rollout/usd": pytest.approx(0.1),  # 36 s x 2 devices x 5 USD / 3600 s
        "phase/rollout/tokens": 900.0,
        "phase/rollout/peak_bytes": 2048.0,
    }


def test_metrics_take_time_and_step_from_the_row() -> None:
    row = MetricRow(time=1000.5, run_id="r", attempt=1, step=7, values={"loss": 0.5})
    (metric,) = training_metrics("sft", row)
    assert (metric.key, metric.value, metric.timestamp, metric.step) == (
        "sft/loss",
        0.5,
        1000500,
        7,
    )
    assert training_metrics("evaluate", row)[0].key == "eval/loss"


def test_names_hold_only_what_mlflow_takes() -> None:
    assert metric_name("phase", "roll(out)%", "seconds") == "phase/roll_out__/seconds"


def test_final_metrics_count_a_boolean_and_leave_null_and_text_out() -> None:
    results = {
        "evaluate": {"kl": 1.5, "reward_hacking": True, "gold_base": None, "reason": "text"},
        "ppo": {},
    }
    assert {metric.key: metric.value for metric in final_metrics(results, 1.0)} == {
        "eval/kl": 1.5,
        "eval/reward_hacking": 1.0,
    }


def test_params_are_flattened_as_in_params_yaml() -> None:
    assert dict(flat_params({"ppo": {"kl": {"coef": 0.05}}, "seed": 1, "columns": {}})) == {
        "ppo.kl.coef": "0.05",
        "seed": "1",
        "columns": "{}",
    }
