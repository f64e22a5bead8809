"""Labelling so far as one record: progress, votes per annotator, agreement, and whether the left side is favoured."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from labelling.agreement import couples, krippendorff_alpha, observed_agreement
from labelling.votes import Pair, Vote, current


def summary(pairs: Sequence[Pair], votes: Sequence[Vote]) -> dict[str, Any]:
    """Counts and fractions; null where there are too few votes."""
    counted = list(current(votes).values())
    units: dict[str, dict[str, int]] = defaultdict(dict)
    for vote in counted:
        if vote.vote is not None:
            units[vote.pair.key][vote.annotator] = vote.vote
    judged = list(units.values())
    keys = {pair.key for pair in pairs}
    return {
        "pairs": len(pairs),
        "pairs_with_votes": len(keys & units.keys()),
        "pairs_with_several_votes": sum(len(unit) > 1 for unit in judged),
        "votes": sum(len(unit) for unit in judged),
        "votes_replaced": len(votes) - len(counted),
        "annotators": [_annotator_summary(name, counted) for name in sorted({vote.annotator for vote in counted})],
        "agreement": observed_agreement(judged),
        "krippendorff_alpha": krippendorff_alpha(judged),
        "couples": [couple._asdict() for couple in couples(judged)],
    }


def _annotator_summary(name: str, votes: Sequence[Vote]) -> dict[str, Any]:
    by_annotator = [vote for vote in votes if vote.annotator == name]
    counts = Counter(vote.vote for vote in by_annotator)
    sided = [vote for vote in by_annotator if vote.vote and vote.left]
    return {
        "annotator": name,
        "votes": len(by_annotator) - counts[None],
        "ties": counts[0],
        "skipped": counts[None],
        "left": sum(vote.vote == vote.left for vote in sided) / len(sided) if sided else None,
    }
