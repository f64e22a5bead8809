"""The few numbers of each stage that `dvc metrics show` prints.

metrics/<stage>.json has up to fifty numbers, too many for a table. `python -m reporting.key_metrics` is the DVC stage
`key_metrics`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.atomic_file import write_atomically
from config.load import load
from reporting.inputs import finite

TARGET = Path("metrics/key.json")
ALIGN = "align"
"""Common names for the numbers of all methods, so that methods are compared in the same columns."""
NAMES = {
    "data": ("rows_kept", "rows_quarantined"),
    "sft": ("eval_loss",),
    "reward": ("accuracy", "bayes_accuracy", "ece"),
    ALIGN: ("score", "kl", "accuracy", "margin"),
    "distill": ("loss", "parameters_student"),
    "evaluate": (
        "win_rate_reward",
        "win_rate_gold",
        "gold_sft",
        "gold_aligned",
        "kl",
        "gold_student",
        "win_rate_student",
        "quality_kept",
    ),
}


def key_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The most important numbers of each stage, if the stage has them; a stage without any is left out."""
    chosen = {
        stage: {name: number for name in names if (number := finite(metrics.get(stage, {}).get(name))) is not None}
        for stage, names in NAMES.items()
    }
    return {stage: numbers for stage, numbers in chosen.items() if numbers}


def write_key_metrics(root: Path, method: str) -> None:
    """Make metrics/key.json from what the stages left below `root`. Raises OSError if a file is missing."""
    metrics = {
        stage: json.loads((root / "metrics" / f"{method if stage == ALIGN else stage}.json").read_text("utf-8"))
        for stage in NAMES
    }
    text = json.dumps(key_metrics(metrics), indent=1) + "\n"
    target = root / TARGET
    if not target.exists() or target.read_text("utf-8") != text:
        write_atomically(target, text)


if __name__ == "__main__":
    write_key_metrics(Path(), load(Path("params.yaml")).align.method)
