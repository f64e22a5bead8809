from mlflow.entities import Metric

from config.records import MetricRow
from config.workspace.retraining import Contest, Mean, Safety, Share
from tracking.rows import contest_metrics, final_metrics, metric_name, training_metrics


def test_metrics_take_time_and_step_from_the_row() -> None:
    row = MetricRow(time=1000.5, run_id="r", attempt=1, step=7, values={"loss": 0.5})
    (metric,) = training_metrics("sft", row)
    assert (metric.key, metric.value, metric.timestamp, metric.step) == ("sft/loss", 0.5, 1000500, 7)
    assert training_metrics("evaluate", row)[0].key == "eval/loss"


def test_names_hold_only_what_mlflow_takes() -> None:
    assert metric_name("phase", "roll(out)%", "seconds") == "phase/roll_out__/seconds"


def test_final_metrics_count_a_boolean_and_leave_null_and_text_out() -> None:
    results = {"evaluate": {"kl": 1.5, "reward_hacking": True, "gold_base": None, "reason": "text"}, "ppo": {}}
    assert {metric.key: metric.value for metric in final_metrics(results, 1.0)} == {
        "eval/kl": 1.5,
        "eval/reward_hacking": 1.0,
    }


def values(metrics: list[Metric]) -> dict[str, float]:
    assert {(metric.timestamp, metric.step) for metric in metrics} == {(9000, 0)}
    return {metric.key: metric.value for metric in metrics}


def test_every_figure_of_a_contest_is_under_its_name() -> None:
    def mean(value: float) -> Mean:
        return Mean(mean=value, low=value - 0.25, high=value + 0.25)

    contest = Contest(
        prompts=200, left_out=3, judge="gold score",
        win_rate=Share(value=0.6, low=0.53, high=0.67, of=200), ties=10, gold=mean(0.5),
        champion_reward=mean(1.0), challenger_reward=mean(2.0), hacking=False, hacking_reason="",
        hacking_prompts_needed=44, kl=5.0, kl_champion=4.0, chars=80.0, chars_champion=70.0,
        safety=Safety(prompts=9, judge="gold score", drop=mean(3.0)), confidence=0.95,
    )  # fmt: skip
    wanted = {
        "win_rate": 0.6,
        "win_rate_low": 0.53,
        "win_rate_high": 0.67,
        "prompts": 200.0,
        "gold_gain": 0.5,
        "champion_reward_gain": 1.0,
        "challenger_reward_gain": 2.0,
        "kl": 5.0,
        "kl_champion": 4.0,
        "chars": 80.0,
        "chars_champion": 70.0,
        "safety_drop": 3.0,
        "reward_hacking": 0.0,
        "reward_hacking_prompts_needed": 44.0,
        "usd": 7.0,
    }
    result = values(contest_metrics(contest, 7.0, 9.0))
    assert result == {f"contest/{name}": value for name, value in wanted.items()}
