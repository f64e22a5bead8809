"""The default view of MLflow's runs list: pipeline runs, with the columns that matter, and charts of cost against
quality and of where PPO's time went.

MLflow keeps a shared view as a tag of the experiment; a link names it by its key.
"""

import json
from typing import Any

VIEW = "runs"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
LINK_QUERY = f"viewStateShareKey={VIEW}&workflowType=machine_learning"
"""Query string of an experiment's runs page."""
COLUMNS = (
    "metrics.`eval/win_rate`",
    "metrics.`eval/win_rate_low`",
    "metrics.`eval/win_rate_high`",
    "metrics.`eval/gold_aligned`",
    "metrics.`eval/kl`",
    "metrics.`cost/made_milliusd`",
    "params.`align.method`",
    "tags.`rlhf.changed`",
)
COLUMN_PIXELS = 120
PHASES = ("rollout", "logprobs", "score", "reference", "value", "update")
"""Phases of PPO; MLflow hides a chart without values."""


def view() -> str:
    """The tag's value."""
    against = [_scatter("cost/made_milliusd", "eval/win_rate"), _scatter("eval/kl", "eval/win_rate")]
    stages = [_bar(f"stage_seconds/{stage}") for stage in ("sft", "reward", "ppo", "evaluate")]
    phases = [_bar(f"phase_seconds/ppo/{phase}") for phase in PHASES]
    sections = {"Cost and quality": against, "Seconds by stage": stages, "PPO's phases": phases}
    content = {
        "searchFilter": "tags.`rlhf.kind` = 'run'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": dict.fromkeys(COLUMNS, COLUMN_PIXELS),
        "isAccordionReordered": True,  # otherwise MLflow sorts the sections by name
        "compareRunSections": [
            {"uuid": _id(name), "name": name, "display": True, "isReordered": False} for name in sections
        ],
        "compareRunCharts": [
            {**chart, "uuid": f"{_id(name)}-{place}", "metricSectionId": _id(name)}
            for name, charts in sections.items()
            for place, chart in enumerate(charts)
        ],
    }
    return json.dumps(content)


def _id(section: str) -> str:
    return section.lower().replace(" ", "-").replace("'", "")


def _scatter(x: str, y: str) -> dict[str, Any]:
    return {**_chart("SCATTER", 100), "xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}


def _bar(metric: str) -> dict[str, Any]:
    return {**_chart("BAR", 20), "metricKey": metric}


def _chart(kind: str, most_runs: int) -> dict[str, Any]:
    return {"type": kind, "deleted": False, "isGenerated": False, "runsCountToCompare": most_runs}
