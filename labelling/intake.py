"""Imports an export of another tool: votes are appended to the votes file, entries without one are kept with their
reason.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.errors import DataError
from labelling.imports import read_export
from labelling.summary import summary
from labelling.votes import LABELS, VOTES_FILE, append, current, read_votes


class Intake(NamedTuple):
    """Result of an import."""

    imported: int
    unchanged: int
    """Votes already present, or replaced within the file."""
    refused: int
    votes: str
    """The votes file, from the project's folder."""
    quarantine: str | None
    """Where the refused entries are, each with its reason; None if there are none."""
    reasons: str
    """The three most frequent reasons, each with its first occurrence."""
    agreement: float | None
    """Fraction of equal votes among all twos of votes on the same pair, of this file."""


def take_in(root: Path, file: Path, form: str, columns: Mapping[str, str], question: str | None = None) -> Intake:
    """Append the new votes of an export; `columns` maps our names to the export's, and `question` asks for the
    preference.

    Raises DataError if the file cannot be read or gave no vote at all, ParamsError for an unknown format or column.
    """
    votes, refused = read_export(file, form, columns, question)
    current_votes = current(read_votes(root / VOTES_FILE))
    new = [
        vote
        for key, vote in current(votes).items()
        if key not in current_votes or current_votes[key].vote != vote.vote
    ]
    quarantine = _quarantine(root, file, [item._asdict() for item in refused])
    why = _most_frequent_reasons(refused)
    if refused and not votes:
        raise DataError(f"{file}: none of {len(refused)} entries gave a vote: {why}. All of them are in {quarantine}.")
    append(root / VOTES_FILE, new)
    return Intake(
        len(new),
        len(votes) - len(new),
        len(refused),
        str(VOTES_FILE),
        quarantine,
        why,
        summary([], votes)["agreement"],
    )


def _quarantine(root: Path, source: Path, refused: Sequence[dict[str, Any]]) -> str | None:
    """Write the refused entries of one import beside the votes, replacing those of an earlier import of that name."""
    target = LABELS / f"quarantine-{source.stem}.jsonl"
    path = root / target
    if not refused:
        path.unlink(missing_ok=True)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps({"source": str(source), **item}) + "\n" for item in refused))
    return str(target)


def _most_frequent_reasons(refused: Sequence[Any]) -> str:
    first = {item.reason: item for item in reversed(refused)}
    counts = Counter(item.reason for item in refused).most_common(3)
    return "; ".join(
        f"{count} {reason} (first: entry {first[reason].number}: {first[reason].detail})" for reason, count in counts
    )
