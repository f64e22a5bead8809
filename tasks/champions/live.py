"""What users say of a challenger that is served beside the champion."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from config.workspace.feedback import FeedbackStore
from labelling.anytime import Interval, difference_at_any_time
from reporting.numbers import percent


class Live(NamedTuple):
    """The challenger's share of thumbs up minus the champion's, and that in words."""

    difference: Interval
    reason: str


def live_share(root: Path, challenger: str, champion: str, confidence: float) -> Live:
    """Compare the thumbs of two runs' replies; the interval holds for all looks at it together."""
    with closing(FeedbackStore(root)) as store:
        counts = {version.run_id: (version.up, version.rated) for version in store.summary()}
    new, old = (counts.get(run_id, (0, 0)) for run_id in (challenger, champion))
    difference = difference_at_any_time(new, old, confidence)
    verdict = "has 0 in it, so the trial goes on"
    if difference.low > 0 or difference.high < 0:
        verdict = f"is {'above' if difference.low > 0 else 'below'} 0"
    return Live(
        difference,
        f"users call {new[0]} of {new[1]} replies of {challenger} good and {old[0]} of {old[1]} of {champion}: the "
        f"interval of the difference, {percent(difference.low)} to {percent(difference.high)}, {verdict}",
    )
