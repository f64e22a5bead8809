"""The seconds of a reward function, where one takes the reward model's place (reward.kind)."""

import json
from pathlib import Path
from typing import Any

from config.schema import Params
from config.sections.offline import RewardFunction
from costs.planning.data_stage import fixed_stage
from costs.planning.plans import StagePlan
from costs.tables.catalogue import Hardware, Price

START_SECONDS = 6.0
"""Imports of the reward stage, which tries the function."""
TRIED_REPLIES = 400
"""Replies that the stage tries it on (training/rewards/check.py), or fewer."""
UNMEASURED_SECONDS = 1e-3
"""Seconds of one reply before the reward stage has measured them: string comparison and parsing take microseconds; a
function that runs code or asks a server takes far longer.
"""


def seconds_per_reply(params: Params, root: Path) -> float:
    """Seconds of the function for one reply, as the reward stage measured them here; 0 for a reward model."""
    if not isinstance(params.reward, RewardFunction):
        return 0.0
    return float(_measured(params.reward.path, root).get("seconds_per_reply", UNMEASURED_SECONDS))


def plan_function(params: Params, root: Path, device: Hardware, gpus: int, price: Price, rented: int) -> StagePlan:
    """The plan of the reward stage with a function."""
    assert isinstance(params.reward, RewardFunction)
    seconds = seconds_per_reply(params, root)
    measured = _measured(params.reward.path, root)
    basis = "as measured here" if measured else "assumed"
    if measured.get("empty_as_good"):
        basis += "; it scores empty replies as well as known ones"
    return fixed_stage(
        "reward",
        {"start": START_SECONDS, "score": TRIED_REPLIES * seconds},
        TRIED_REPLIES,
        device,
        gpus,
        price,
        rented,
        f"{params.reward.path} takes {seconds:.2g} s a reply, {basis}",
    )


def _measured(path: str, root: Path) -> dict[str, Any]:
    """What the reward stage wrote of this function; {} if it has not run."""
    try:
        card, metrics = (
            json.loads((root / name).read_text(encoding="utf-8"))
            for name in ("models/reward/function.json", "metrics/reward.json")
        )
        return dict(metrics) if card["path"] == path and "seconds_per_reply" in metrics else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
