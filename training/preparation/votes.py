"""Gathers votes, one per line as `rlhf label` writes them, into one row per pair; and reads files that people edit.

prompt, response1, response2, annotator, vote  ->  prompt, response1, response2, votes (a tuple)
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.sections.data import FileSource
from config.terminal_text import shown
from training.preparation.cleaning import Origin, Refusal, Refused
from training.preparation.sources import SourceRow, Table, open_source, parse_json, read_file

logger = logging.getLogger(__name__)

ANNOTATOR, VOTE, GATHERED = "annotator", "vote", "votes"


def votes_by_pair(table: Table, columns: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """One row per pair, at the position of its first line, and its columns; other tables are returned unchanged.

    Of several votes of an annotator on a pair the last counts. A null vote means skipped and withdraws an earlier
    vote. Lines without an annotator are separate votes, and lines that are not objects are left to be refused later.
    """
    if not _one_a_line(table, columns):
        return table, dict(columns)
    annotator_column, vote = columns.get(ANNOTATOR, ANNOTATOR), columns.get(VOTE, VOTE)
    rows: list[SourceRow] = []
    votes_of: dict[str, dict[Any, Any]] = {}
    for row in table.rows:
        if not isinstance(row.content, dict):
            rows.append(row)
            continue
        content = {ours: row.content[ours] for ours in row.content if ours not in (annotator_column, vote, GATHERED)}
        pair = json.dumps([content.get(columns[name]) for name in ("prompt", "response1", "response2")], default=str)
        if pair not in votes_of:
            votes_of[pair] = {}
            rows.append(SourceRow(row.number, content | {GATHERED: votes_of[pair]}))
        annotator = row.content.get(annotator_column)
        votes_of[pair][row.number if annotator is None else str(annotator)] = row.content.get(vote, "")
    return table._replace(rows=[_with_tuple(row) for row in rows]), {**columns, "annotators": GATHERED}


def annotator_columns(columns: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in columns["annotators"].split(",") if name.strip()]


def in_own_layout(table: Table, columns: Mapping[str, str]) -> bool:
    """Whether votes are as `rlhf label` writes them, 0 for a tie, or in columns of that name."""
    if _one_a_line(table, columns):
        return (columns.get(ANNOTATOR, ANNOTATOR), columns.get(VOTE, VOTE)) == (ANNOTATOR, VOTE)
    return all(re.fullmatch(rf"{ANNOTATOR}\d+", name) for name in annotator_columns(columns))


def _one_a_line(table: Table, columns: Mapping[str, str]) -> bool:
    """Whether some row has an annotator and a vote, and none a column of votes per annotator."""
    per_annotator = set(annotator_columns(columns))
    missing = {columns.get(ANNOTATOR, ANNOTATOR), columns.get(VOTE, VOTE)}
    for row in table.rows:
        if isinstance(row.content, dict):
            if per_annotator & row.content.keys():
                return False
            missing -= row.content.keys()
    return not missing


def _with_tuple(row: SourceRow) -> SourceRow:
    if not isinstance(row.content, dict):
        return row
    return row._replace(
        content=row.content | {GATHERED: tuple(vote for vote in row.content[GATHERED].values() if vote is not None)}
    )


# ---------------------------------------------------------------- files that people edit


def read_vote_lines(source: FileSource, root: Path, setting: str) -> tuple[Table, list[Refusal]]:
    """The rows of a votes source, and its invalid lines: one damaged line must not block the others.

    A missing or empty local file has no rows. Raises DataError as `read_file` does for anything but JSON lines.
    """
    path = root / source.path
    if "://" not in source.path and (not path.exists() or not path.stat().st_size):
        logger.info("%s has no votes yet", source.path)
        return Table(source.path, "line", []), []
    if not source.path.endswith(".jsonl"):
        return read_file(source, root, setting), []
    rows, refusals = [], []
    with open_source(source.path, root, setting).opened() as file:
        lines = [(i, line.rstrip(b"\n")) for i, line in enumerate(file, start=1) if line.strip()]
    for number, line in lines:
        try:
            rows.append(SourceRow(number, _parse_row(line, source.format)))
        except Refused as refused:
            original = line.decode(errors="backslashreplace")
            refusals.append(
                Refusal(refused.reason, refused.detail, Origin(source.path, "line", number, refused.column, original))
            )
    return Table(source.path, "line", rows), refusals


def _parse_row(line: bytes, form: str) -> Any:
    """Parse a line. Raises Refused if it is not a JSON object or has an invalid vote."""
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Refused("not_unicode", "", f"byte 0x{line[error.start]:02x} is not UTF-8") from None
    except ValueError as error:
        raise Refused(
            "not_json", "", f"{getattr(error, 'msg', error)} at column {getattr(error, 'colno', 1)}"
        ) from None
    if not isinstance(row, dict):
        raise Refused("wrong_type", "", f"{type(row).__name__} where an object with columns is expected")
    if form == "votes" and ANNOTATOR in row and VOTE in row and not _is_vote(row[VOTE]):
        raise Refused("not_a_vote", VOTE, f"{shown(row[VOTE])} is not one of 0 (tie), 1, 2, null (skipped)")
    return row


def _is_vote(value: Any) -> bool:
    return not isinstance(value, bool) and (value is None or value in (0, 1, 2, "0", "1", "2"))
