"""Outputs of stage `distill` in a run without a student: DVC's stage `evaluate` depends on models/distill in every
run.
"""

import json
from pathlib import Path

from config.atomic_file import write_atomically

OUTS = ("models/distill", "metrics/distill.json", "plots/distill.csv")
NO_STUDENT = {
    "models/distill/none.json": json.dumps({"distill": None}) + "\n",
    "metrics/distill.json": "{}\n",
    "plots/distill.csv": "step,loss\n",
}
"""Path -> content of what says that there is no student."""


def write_no_student(root: Path) -> None:
    """Write empty outputs if there are none; those of an earlier student stay."""
    for out, (name, text) in zip(OUTS, NO_STUDENT.items(), strict=True):
        if not (root / out).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(root / name, text)
