"""Votes that stand one a line, as `rlhf label` writes them, gathered into one row a pair.

prompt, response1, response2, annotator, vote  ->  prompt, response1, response2, votes (a tuple)
"""

import json
from collections.abc import Mapping
from typing import Any

from training.sources import SourceRow, Table

ANNOTATOR, VOTE, GATHERED = "annotator", "vote", "votes"


def gather(table: Table, columns: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """One row a pair, at the place of its first line, and the columns to read it with; a table of another kind as it is.

    Of several votes of an annotator on a pair the last counts. A vote of null is a pair that was skipped, which also takes an
    earlier vote back. Lines without an annotator are votes of their own, and what is no object is left for its refusal.
    """
    if not _one_a_line(table, columns):
        return table, dict(columns)
    rows: list[SourceRow] = []
    votes_of: dict[str, dict[Any, Any]] = {}
    for row in table.rows:
        if not isinstance(row.content, dict):
            rows.append(row)
            continue
        content = {ours: row.content[ours] for ours in row.content if ours not in (ANNOTATOR, VOTE, GATHERED)}
        pair = json.dumps([content.get(columns[name]) for name in ("prompt", "response1", "response2")], default=str)
        if pair not in votes_of:
            votes_of[pair] = {}
            rows.append(SourceRow(row.number, content | {GATHERED: votes_of[pair]}))
        annotator = row.content.get(ANNOTATOR)
        votes_of[pair][row.number if annotator is None else str(annotator)] = row.content.get(VOTE, "")
    return table._replace(rows=[_with_tuple(row) for row in rows]), {**columns, "annotators": GATHERED}


def _one_a_line(table: Table, columns: Mapping[str, str]) -> bool:
    """Whether some row has an annotator and a vote, and none a column of votes per annotator."""
    present = {name for row in table.rows if isinstance(row.content, dict) for name in row.content}
    per_annotator = {name.strip() for name in columns["annotators"].split(",")}
    return {ANNOTATOR, VOTE} <= present and not per_annotator & present


def _with_tuple(row: SourceRow) -> SourceRow:
    if not isinstance(row.content, dict):
        return row
    return row._replace(content=row.content | {GATHERED: tuple(vote for vote in row.content[GATHERED].values() if vote is not None)})
