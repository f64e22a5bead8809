"""Rows of a stage as MLflow metrics. The same row always gives the same metrics, so shipping twice stores once."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mlflow.entities import Metric

from config.records import MetricRow, UsageRow
from config.workspace.benchmarked import Benchmark, Load
from config.workspace.retraining import Contest
from costs.formulas.serving import price_of
from costs.ledger.ledger import Ledger, StageCost, usd_per_win_rate_point
from costs.ledger.reconcile import Comparison, Reconciled
from costs.tables.price import StagePrice

PREFIXES = {"evaluate": "eval"}
"""Stage -> first part of its metrics' names, if it is not the stage's name."""


def metric_name(*parts: str) -> str:
    """Join parts with slashes and replace characters that MLflow refuses."""
    return "/".join(re.sub(r"[^\w\-. ]", "_", part) for part in parts)


def training_metrics(stage: str, row: MetricRow) -> list[Metric]:
    """`sft/loss` ..., at the row's step."""
    return [
        _metric(metric_name(PREFIXES.get(stage, stage), name), value, row.time, row.step)
        for name, value in row.values.items()
    ]


def usage_metrics(row: UsageRow, price: StagePrice) -> list[Metric]:
    """`phase/<phase>/seconds` and the other quantities of a phase of one step."""
    spent = {
        "seconds": row.seconds,
        "usd": price.usd_of_rows([row]),
        "tokens": row.tokens,
        "peak_bytes": row.peak_bytes,
    }
    return [_metric(metric_name("phase", row.phase, name), value, row.time, row.step) for name, value in spent.items()]


def so_far(row: UsageRow, usd: float) -> Metric:
    """`usd_so_far`: what the attempt has cost when this phase ended, to draw any curve against money."""
    return _metric("usd_so_far", usd, row.time, row.step)


def final_metrics(metrics: Mapping[str, Mapping[str, Any]], time: float) -> list[Metric]:
    """The numbers in metrics/<stage>.json of each stage; booleans count as 0 or 1, null and text are left out."""
    return [
        _metric(metric_name(PREFIXES.get(stage, stage), name), value, time, 0)
        for stage, values in metrics.items()
        for name, value in values.items()
        if isinstance(value, bool | int | float)
    ]


def cost_metrics(ledger: Ledger, time: float) -> list[Metric]:
    """`cost/*` of a pipeline run, `stage_usd/<stage>`, `phase_usd/<stage>/<phase>`, and the same in seconds."""
    values = {
        "cost/usd": ledger.total_usd,
        "cost/gpu_hours": ledger.device_seconds / 3600,
        "cost/waste_usd": ledger.waste_usd,
        "cost/saved_usd": ledger.saved_usd,
        "cost/seconds": ledger.total_seconds,
    }
    if ledger.taught_nothing_usd:
        values["cost/taught_nothing_usd"] = ledger.taught_nothing_usd
    for stage in ledger.stages:
        values |= _stage_costs(stage)
    return [_metric(name, value, time, 0) for name, value in values.items()]


def _stage_costs(stage: StageCost) -> dict[str, float]:
    """MLflow groups the charts of `a/b/c` under `a/b`, so metrics to compare differ in their last part only."""
    costs = {f"stage_seconds/{stage.stage}": stage.seconds, f"stage_usd/{stage.stage}": stage.usd}
    for phase in stage.phases:
        costs[metric_name("phase_seconds", stage.stage, phase.phase)] = phase.seconds
        costs[metric_name("phase_usd", stage.stage, phase.phase)] = phase.usd
    return costs


def bought_metrics(evaluated: Mapping[str, Any], ledger: Ledger, time: float) -> list[Metric]:
    """Price and result: `cost/made_usd`, reused stages included, `eval/win_rate` on the best evidence with its bounds,
    and the one per the other.

    `cost/milliusd` and `cost/made_milliusd` are thousandths of a dollar: MLflow rounds what it shows, and most runs of
    a small model would cost 0.00.

    `evaluated`: metrics/evaluate.json, empty without an evaluation.
    """
    kinds = (kind for kind in ("gold", "reward") if evaluated.get(f"win_rate_{kind}") is not None)
    best = f"win_rate_{next(kinds, 'gold')}"
    rate = evaluated.get(best)
    values = {
        "cost/made_usd": ledger.made_usd or None,
        "cost/milliusd": 1000 * ledger.total_usd,
        "cost/made_milliusd": 1000 * ledger.made_usd or None,
        "eval/win_rate": rate,
        "eval/win_rate_low": evaluated.get(f"{best}_low"),
        "eval/win_rate_high": evaluated.get(f"{best}_high"),
        "cost/usd_per_win_rate_point": usd_per_win_rate_point(ledger.made_usd, rate),
    }
    return [_metric(name, value, time, 0) for name, value in values.items() if value is not None]


def contest_metrics(contest: Contest, usd: float, time: float) -> list[Metric]:
    """`contest/*` of a run that a retrain cycle compared with the champion; `usd` is the cost of the cycle."""
    values = {
        "win_rate": contest.win_rate.value,
        "win_rate_low": contest.win_rate.low,
        "win_rate_high": contest.win_rate.high,
        "prompts": contest.prompts,
        "gold_gain": contest.gold.mean if contest.gold else None,
        "champion_reward_gain": contest.champion_reward.mean,
        "challenger_reward_gain": contest.challenger_reward.mean,
        "kl": contest.kl,
        "kl_champion": contest.kl_champion,
        "chars": contest.chars,
        "chars_champion": contest.chars_champion,
        "safety_drop": contest.safety.drop.mean if contest.safety else None,
        "reward_hacking": contest.hacking,
        "reward_hacking_prompts_needed": contest.hacking_prompts_needed,
        "usd": usd,
    }
    return [_metric(f"contest/{name}", value, time, 0) for name, value in values.items() if value is not None]


def plan_metrics(reconciled: Reconciled, kwh: float, time: float) -> list[Metric]:
    """`plan/*` of a pipeline run and of its stages, for comparison with the measurements; `cost/kwh`."""
    values = {"cost/kwh": kwh} | _planned("plan", reconciled.total)
    for stage in reconciled.stages:
        values |= _planned(metric_name("plan", stage.stage), stage.total)
    return [_metric(name, value, time, 0) for name, value in values.items()]


def _planned(prefix: str, comparison: Comparison) -> dict[str, float]:
    values = {
        "usd": comparison.planned_usd,
        "seconds": comparison.planned_seconds,
        "peak_bytes": comparison.planned_peak_bytes,
        "error_seconds": comparison.error,
        "error_peak_bytes": comparison.error_peak_bytes,
    }
    return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


def _metric(name: str, value: float, time: float, step: int) -> Metric:
    return Metric(name, float(value), round(time * 1000), step)


def serving_name(benchmark: Benchmark) -> str:
    """Name of a way to serve a model, in metrics and tags."""
    return "-".join(str(part) for part in benchmark.variant if part)


def serving_metrics(benchmark: Benchmark) -> list[Metric]:
    """`serve/<way>/tokens_per_second` and others; the step is the concurrency."""
    time = datetime.fromisoformat(benchmark.time).timestamp()
    return [
        _metric(metric_name("serve", serving_name(benchmark), name), value, time, load.concurrency)
        for load in benchmark.loads
        if load.concurrency is not None
        for name, value in _served(benchmark, load).items()
        if value is not None
    ]


def serving_rows(benchmark: Benchmark) -> list[dict[str, Any]]:
    """A table row per load."""
    return [
        {
            "served by": serving_name(benchmark),
            "concurrency": load.concurrency,
            "requests per second": load.requests_per_second,
            "requests": load.requests,
            "failed": load.failed,
            **_served(benchmark, load),
        }
        for load in benchmark.loads
    ]


def serving_line(benchmark: Benchmark) -> str | None:
    """A benchmark in one line, at its knee."""
    load = benchmark.at_knee()
    if load is None:
        return None
    shown = _served(benchmark, load)
    prices = ", ".join(
        f"{_short(shown[f'usd_per_million_{kind}tokens'])} USD per million {kind.replace('_', ' ')}tokens"
        for kind in ("", "input_", "output_")
    )
    return (
        f"{load.tokens_per_second:.0f} tokens/s at concurrency {load.concurrency}, p95 TPOT "
        f"{_short(shown['tpot_ms_p95'])} ms; {prices} at {benchmark.usd_per_hour:g} USD an hour"
    )


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _served(benchmark: Benchmark, load: Load) -> dict[str, float | None]:
    price, busy = price_of(benchmark, load), price_of(benchmark, load, "usage")
    return {
        "tokens_per_second": load.tokens_per_second,
        "goodput_per_second": load.goodput_per_second,
        **{
            f"{name}_{p}": getattr(latency, p) if latency else None
            for name, latency in (("ttft_ms", load.ttft_ms), ("tpot_ms", load.tpot_ms))
            for p in ("p50", "p95", "p99")
        },
        "usd_per_million_tokens": price.blended,
        "usd_per_million_input_tokens": price.input,
        "usd_per_million_output_tokens": price.output,
        "usage_usd_per_million_tokens": busy.blended,
    }
