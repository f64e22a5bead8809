"""Inspects a data file before training: format and columns, refused rows and reasons, and the
`data.source` block that reads it.

python -m training.preparation.inspection FILE [--format F] [--columns NAME=COLUMN ...]
    -> one JSON object on stdout, the fields of `Inspection`
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from config.errors import DataError, ParamsError
from config.load import load
from config.schema import Params
from config.sections.data import FileSource
from training.modeling.tokenizer import SPECIAL_TOKENS, prompt_text
from training.preparation.baselines import ReplyPair, bag_of_words, longer_wins
from training.preparation.cleaning import (
    Refusal,
    TextRules,
    contradictory_pairs,
    reasons,
    same_prompt_key,
    same_text_key,
)
from training.preparation.examples import parse_table
from training.preparation.fit import Fit, fit
from training.preparation.formats import COLUMNS, Example, check_columns, column_names
from training.preparation.layouts import MESSAGES, holds_prompt, holds_ranked_replies, in_format
from training.preparation.sources import Table, csv_delimiter, read_file
from training.preparation.splits import split_of
from training.preparation.votes import ANNOTATOR, VOTE
from training.process.command import run_command

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "question", "query", "context", "user", "input", "text"),
    "chosen": ("chosen", "preferred", "accepted", "chosen_response", "response_chosen", "better"),
    "rejected": ("rejected", "dispreferred", "rejected_response", "response_rejected", "worse"),
    "response1": ("response1", "response_1", "response_a", "answer_a", "output_1", "reply_a"),
    "response2": ("response2", "response_2", "response_b", "answer_b", "output_2", "reply_b"),
    "completion": ("completion", "response", "answer", "output", "reply", "solution"),
}
"""Our column -> common names in files, likeliest first."""

ANNOTATORS = re.compile(r"(annotator|vote|label|rater|judge)[ _]?\d+$", re.IGNORECASE)
WINNER_COLUMNS = ("winner", "vote", "preference", "preferred", "choice", "label")
"""Names of a column with the preferred one of two replies."""
ROWS_LOOKED_AT = 1000
FEWEST_PAIRS = 20
"""Fewest pairs to train or test on for a meaningful baseline."""


class Inspection(NamedTuple):
    file: str
    format: str
    delimiter: str | None
    """Delimiter of a local csv file."""
    columns: dict[str, str]
    """Our columns -> the file's, if they differ."""
    unread: list[str]
    """Unused columns."""
    rows: int
    """Rows read; of trees, messages."""
    refused: dict[str, dict[str, Any]]
    """Reason -> its count, with the first place and detail."""
    prompts: int
    """Distinct prompts, and the number held out for tests."""
    test_prompts: int
    pairs: int
    demonstrations: int
    ties: int
    duplicates: int
    """Duplicate pairs (demonstrations, prompts)."""
    contradictory_pairs: int
    words: dict[str, dict[str, float]]
    """prompt, reply -> mean, p95, max."""
    chosen_longer: float | None
    chosen_first: float | None
    baselines: dict[str, list[float]]
    """Accuracy on held-out pairs with its 95% interval."""
    samples: list[tuple[str, str]]
    """Rows as a model sees them: the context and the reply."""
    source: dict[str, Any]
    """The data.source block."""
    fit: dict[str, Any] | None
    """Fit with the params (`Fit`); None if unknown."""
    fit_unknown: str | None
    """Why it is unknown."""


def inspect(
    path: str, root: Path, params: Params, form: str | None, columns: Mapping[str, str]
) -> Inspection:
    """Inspect a local file or URL; `form` and `columns` override what is detected.

    Raises DataError if it cannot be read or its format cannot be detected, ParamsError for a column
    that the format does not have.
    """
    source = FileSource(kind="file", path=path, format="pairs", columns={})
    table = read_file(source, root, "data.source")
    form, named = recognised(table, form, columns)
    given = {ours: theirs for ours, theirs in named.items() if COLUMNS[form].get(ours) != theirs}
    readable = column_names(form, given, "data.source")
    seen = _columns(table)
    table, readable = in_format(table, form, readable)
    check_columns(table, form, readable, "data.source")
    special = SPECIAL_TOKENS if params.model.path is None else ()
    rules = TextRules(params.data.max_prompt_chars, params.data.max_response_chars, special)
    parsed = parse_table(table, form, readable, rules)
    pairs = _unique_pairs(parsed.examples)
    fits = fit(parsed, params) if parsed.examples else "no row can be read."
    return Inspection(
        file=path,
        format=form,
        delimiter=_delimiter(root / path),
        columns=given,
        unread=[] if form == "trees" else _unread(seen, readable, gathered=form == "votes"),
        rows=parsed.rows_read,
        refused=_refused(parsed.refusals),
        prompts=len({same_prompt_key(example.prompt) for example in parsed.examples}),
        test_prompts=_held_out(parsed.examples, params),
        pairs=sum(len(example.pairs) for example in parsed.examples),
        demonstrations=sum(len(example.completions) for example in parsed.examples),
        ties=parsed.ties,
        duplicates=_duplicates(parsed.examples),
        contradictory_pairs=contradictory_pairs(pairs),
        words=_words(parsed.examples),
        chosen_longer=longer_wins([ReplyPair(*pair[1:]) for pair in pairs]).value
        if pairs
        else None,
        chosen_first=_chosen_first(parsed.examples),
        baselines=_baselines(parsed.examples, params),
        samples=[_as_seen(example, params) for example in parsed.examples[:3]],
        source={"kind": "file", "path": path, "format": form, "columns": given},
        fit=fits._asdict() if isinstance(fits, Fit) else None,
        fit_unknown=fits if isinstance(fits, str) else None,
    )


# ---------------------------------------------------------------- format and columns


def recognised(
    table: Table, form: str | None, columns: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Format and columns (ours -> the file's) of a table, detected from column names and types.

    Raises DataError with the existing columns and what each format needs.
    """
    if form is None and any(isinstance(row.content, str) for row in table.rows[:ROWS_LOOKED_AT]):
        return "prompts", dict(columns)
    present = _columns(table)
    forms = [form] if form else ["trees", "votes", "pairs", "instructions", "prompts"]
    for candidate in forms:
        found = _mapping(candidate, present, table, columns)
        if found is not None:
            return candidate, {**found, **columns}
    if form is not None:  # given by the user: check_columns reports what is missing
        return form, dict(columns)
    needs = "; ".join(f"{name}: {', '.join(ours)}" for name, ours in COLUMNS.items())
    raise DataError(
        f"{table.place}: its columns ({', '.join(present) or 'none: its rows are no objects'}) fit "
        f"no format. What they need: {needs}. Name them: --format pairs --column "
        "prompt=COLUMN --column chosen=COLUMN --column rejected=COLUMN."
    )


def _mapping(
    form: str, present: Sequence[str], table: Table, columns: Mapping[str, str]
) -> dict[str, str] | None:
    """Our columns -> the file's, None for missing ones."""
    lower = {name.lower(): name for name in reversed(present)}
    found = {
        ours: columns.get(ours) or _synonym(ours, lower)
        for ours in COLUMNS[form]
        if ours in SYNONYMS and not (form == "trees" and ours != "prompt")
    }
    if form == "pairs" and found["prompt"] is None and None not in list(found.values())[1:]:
        own = [
            holds_prompt(row, str(found["chosen"]), str(found["rejected"]))
            for row in _objects(table)
        ]
        found["prompt"] = "prompt" if own and sum(own) > len(own) / 2 else None
    if form == "instructions" and set(MESSAGES) & set(present) and "prompt" not in columns:
        return {}
    if None in found.values():
        return None
    named = {ours: theirs for ours, theirs in found.items() if theirs is not None}
    if form == "trees" and not _holds_replies(table, named["prompt"]):
        return None
    one_vote = {columns.get(ANNOTATOR, ANNOTATOR), columns.get(VOTE, VOTE)}
    if form == "votes" and not one_vote <= set(present):
        annotators = (
            columns.get("annotators")
            or columns.get("vote")
            or ", ".join(filter(ANNOTATORS.match, present))
            or next((lower[name] for name in WINNER_COLUMNS if name in lower), "")
        )
        if not annotators:
            return None
        named["annotators"] = annotators
    if form in ("votes", "instructions", "prompts") and "input" in columns:
        named["input"] = columns["input"]
    elif named["prompt"] in ("instruction", "question") and "input" in present:
        named["input"] = "input"
    return named


def _synonym(ours: str, lower: Mapping[str, str]) -> str | None:
    return next((lower[name] for name in SYNONYMS[ours] if name in lower), None)


def _holds_replies(table: Table, column: str) -> bool:
    return any(
        (isinstance(row.get(column), dict) and "replies" in row[column])
        or holds_ranked_replies(row)
        for row in _objects(table)
    )


def _objects(table: Table) -> list[dict[str, Any]]:
    """The rows used for detection: those that are objects."""
    return [row.content for row in table.rows[:ROWS_LOOKED_AT] if isinstance(row.content, dict)]


def _columns(table: Table) -> list[str]:
    return list(dict.fromkeys(name for row in _objects(table) for name in row if name is not None))


def _delimiter(path: Path) -> str | None:
    if path.suffix.lower() != ".csv" or not path.is_file():
        return None
    with path.open(encoding="utf-8-sig") as file:
        return csv_delimiter(file.read(100_000))


def _unread(present: Iterable[str], columns: Mapping[str, str], gathered: bool) -> list[str]:
    read = {name.strip() for theirs in columns.values() for name in theirs.split(",")}
    return [
        name
        for name in present
        if name not in read and not (gathered and name in (ANNOTATOR, VOTE))
    ]


# ---------------------------------------------------------------- rows


def _refused(refusals: Sequence[Refusal]) -> dict[str, dict[str, Any]]:
    first = {refusal.reason: refusal for refusal in reversed(refusals)}
    return {
        reason: {
            "rows": count,
            "first": str(first[reason].origin),
            "detail": first[reason].detail,
        }
        for reason, count in reasons(refusals).items()
    }


def _held_out(examples: Iterable[Example], params: Params) -> int:
    """Distinct prompts held out for tests."""
    fraction = params.data.test_fraction
    prompts = {
        same_prompt_key(example.prompt)
        for example in examples
        if split_of(example.prompt, fraction) == "test"
    }
    return len(prompts)


def _unique_pairs(examples: Iterable[Example]) -> list[tuple[str, str, str]]:
    return list(
        dict.fromkeys(
            (
                same_prompt_key(example.prompt),
                same_text_key(pair.chosen),
                same_text_key(pair.rejected),
            )
            for example in examples
            for pair in example.pairs
        )
    )


def _duplicates(examples: Sequence[Example]) -> int:
    def keys(example: Example) -> list[tuple[str, ...]]:
        replies: list[tuple[str, ...]] = [pair[:2] for pair in example.pairs]
        replies = replies or [(text,) for text in example.completions]
        prompt = same_prompt_key(example.prompt)
        return [(prompt, *map(same_text_key, texts)) for texts in replies] or [(prompt,)]

    found = [key for example in examples for key in keys(example)]
    return len(found) - len(set(found))


def _words(examples: Sequence[Example]) -> dict[str, dict[str, float]]:
    texts = {
        "prompt": [prompt_text(example.prompt) for example in examples],
        "reply": [
            text
            for example in examples
            for text in (
                [text for pair in example.pairs for text in pair[:2]] or example.completions
            )
        ],
    }
    lengths = {name: [len(text.split()) for text in found] for name, found in texts.items()}
    return {
        name: {
            "mean": fmean(counts),
            "p95": quantiles(counts, n=20, method="inclusive")[-1]
            if len(counts) > 1
            else counts[0],
            "max": max(counts),
        }
        for name, counts in lengths.items()
        if counts
    }


def _chosen_first(examples: Iterable[Example]) -> float | None:
    shown = [
        pair.chosen_first
        for example in examples
        for pair in example.pairs
        if pair.chosen_first is not None
    ]
    return fmean(shown) if shown else None


def _baselines(examples: Sequence[Example], params: Params) -> dict[str, list[float]]:
    """Baselines of the reward model on held-out prompts."""
    pairs: dict[str, list[ReplyPair]] = {"train": [], "test": []}
    for example in examples:
        split = split_of(example.prompt, params.data.test_fraction)
        pairs[split] += [ReplyPair(pair.chosen, pair.rejected) for pair in example.pairs]
    if min(map(len, pairs.values())) < FEWEST_PAIRS:
        return {}
    return {
        "longer_wins": list(longer_wins(pairs["test"])),
        "bow": list(bag_of_words(pairs["train"], pairs["test"])),
    }


def _as_seen(example: Example, params: Params) -> tuple[str, str]:
    prompt = (
        params.data.prompt_template.replace("{prompt}", example.prompt)
        if isinstance(example.prompt, str)
        else prompt_text(example.prompt)
    )
    reply = next((pair.chosen for pair in example.pairs), next(iter(example.completions), ""))
    return prompt, reply


# ---------------------------------------------------------------- the process


def main() -> None:
    """Entry point of `rlhf data check`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--format")
    parser.add_argument("--columns", action="append", default=[], metavar="NAME=COLUMN")
    given = parser.parse_args()
    for item in given.columns:
        if "=" not in item:
            raise ParamsError(f"--column {item}: write OURS=THEIRS, such as prompt=question.")
    if given.format is not None and given.format not in COLUMNS:
        raise ParamsError(f"--format {given.format} is not one of {', '.join(COLUMNS)}.")
    columns = dict(item.split("=", 1) for item in given.columns)
    found = inspect(given.file, Path.cwd(), load(given.params), given.format, columns)
    json.dump(found._asdict(), sys.stdout)


if __name__ == "__main__":
    sys.exit(run_command(main, level=logging.WARNING))
