"""Inspects a data file before training: format and columns, refused rows and reasons, and the
`data.source` block that reads it.

python -m training.preparation.inspection FILE [--format F] [--columns NAME=COLUMN ...]
    -> one JSON object on stdout, the fields of `Inspection`
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple, get_args

from config.errors import ModelError, ParamsError
from config.load import load
from config.schema import Params
from config.sections.data import FileSource, PythonSource, Vote
from training.modeling.tokenizer import (
    SPECIAL_TOKENS,
    pretrained_tokenizer,
    prompt_text,
    special_tokens,
)
from training.preparation.baselines import ReplyPair, bag_of_words, longer_wins
from training.preparation.cleaning import (
    Refusal,
    TextRules,
    contradictory_pairs,
    reasons,
    same_prompt_key,
)
from training.preparation.columns import (
    BEFORE,
    COLUMNS,
    NoLayout,
    check_columns,
    column_names,
    names_of,
    recognised,
)
from training.preparation.examples import parse_table
from training.preparation.fit import Fit, fit
from training.preparation.formats import Example
from training.preparation.layouts import FORMATS, MESSAGES, ORDERS, PYTHON, REPLIES
from training.preparation.sources import csv_delimiter, read_file, read_python
from training.preparation.splits import SPLITS, split_of
from training.preparation.summary import side_by_side
from training.preparation.votes import ANNOTATOR, VOTE
from training.process.command import run_command

FEWEST_PAIRS = 20
"""Fewest pairs to train or test on for a meaningful baseline."""
MOST_PAIRS = 20_000
"""Of each split, for the bag of words: more move it by less than its interval."""


class Inspection(NamedTuple):
    file: str
    format: str
    layout: str | None
    """Name of the published layout, if it is one."""
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
    warnings: list[str]
    """What may be wrong with the rows as a whole."""
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
    side_by_side: list[str]
    """Two pairs, in lines."""
    source: dict[str, Any]
    """The data.source block."""
    fit: dict[str, Any] | None
    """Fit with the params (`Fit`); None if unknown."""
    fit_unknown: str | None
    """Why it is unknown."""


def inspect(
    path: str,
    root: Path,
    params: Params,
    form: str | None,
    columns: Mapping[str, str],
    vote: str | None = None,
    reader: str | None = None,
) -> Inspection:
    """Inspect a local file or URL; `form`, `columns` and `vote` override what is detected, and a
    `reader` of one's own reads it.

    Raises DataError if it cannot be read or is in no known layout, ParamsError for a column that
    the format does not have.
    """
    source: FileSource | PythonSource
    if reader is not None:
        source = PythonSource(kind="python", path=reader, files=[path])
        table, form, given = read_python(source, root, "data.source"), PYTHON, {}
        readable: Mapping[str, str] = {}
        name = None
    else:
        source = FileSource(kind="file", path=path, format="pairs", columns={})
        table = read_file(source, root, "data.source")
        found = recognised(table, form, columns)
        form, vote, name = found.form, vote or found.vote, found.name
        usual, present = COLUMNS.get(form, {}), names_of(table)
        given = {
            ours: theirs
            for ours, theirs in found.columns.items()
            if usual.get(ours) != theirs and not (name and ours in BEFORE and theirs not in present)
        }
        readable = column_names(form, given, "data.source")
        check_columns(table, form, readable, "data.source")
        update = {"format": form, "columns": given, "vote": vote}
        source = source.model_copy(update=update)
    try:
        base = (
            None
            if params.model.path is None
            else pretrained_tokenizer(params.model, params.data.prompt_template)
        )
        unknown = None
    except ModelError as error:
        base, unknown = None, str(error)
    special = SPECIAL_TOKENS if params.model.path is None else special_tokens(base) if base else ()
    rules = TextRules(params.data.max_prompt_chars, params.data.max_response_chars, special)
    parsed = parse_table(table, form, readable, vote, rules)
    fits: Fit | str = unknown or "no row can be read."
    if parsed.examples and unknown is None:
        parsed, fits = fit(parsed, base, params)  # ModelError: a run would fail in the same way
    pairs = _unique_pairs(parsed.examples)
    all_columns = form not in COLUMNS or form == "trees"
    return Inspection(
        file=path,
        format=form,
        layout=name,
        delimiter=_delimiter(root / path),
        columns=given,
        unread=[] if all_columns else _unread(names_of(table), form, readable),
        rows=parsed.rows_read,
        refused=_refused(parsed.refusals),
        warnings=list(parsed.warnings),
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
        side_by_side=side_by_side(parsed.examples),
        source=source.model_dump(mode="json"),
        fit=fits._asdict() if isinstance(fits, Fit) else None,
        fit_unknown=fits if isinstance(fits, str) else None,
    )


def _delimiter(path: Path) -> str | None:
    if path.suffix.lower() != ".csv" or not path.is_file():  # not of a compressed one
        return None
    with path.open(encoding="utf-8-sig") as file:
        return csv_delimiter(file.read(100_000))


def _unread(present: Iterable[str], form: str, columns: Mapping[str, str]) -> list[str]:
    """The columns that no reader looks at."""
    read = {name.strip() for theirs in columns.values() for name in theirs.split(",")}
    read |= {"votes": {ANNOTATOR, VOTE}, "ranked": {*REPLIES, *ORDERS}}.get(form, set())
    if form == "instructions" and columns["prompt"] not in present:
        read |= set(MESSAGES)
    return [name for name in present if name not in read]


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
                pair.chosen,
                pair.rejected,
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
        return [(prompt, *texts) for texts in replies] or [(prompt,)]

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
        "bow": list(bag_of_words(*(pairs[split][:MOST_PAIRS] for split in SPLITS))),
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
    parser.add_argument("--vote")
    parser.add_argument("--reader")
    given = parser.parse_args()
    for item in given.columns:
        if "=" not in item:
            raise ParamsError(f"--column {item}: write OURS=THEIRS, such as prompt=question.")
    for option, value, known in (
        ("--format", given.format, list(FORMATS)[:-1]),
        ("--vote", given.vote, get_args(Vote)),
    ):
        if value is not None and value not in known:
            raise ParamsError(f"{option} {value} is not one of {', '.join(known)}.")
    columns = dict(item.split("=", 1) for item in given.columns)
    params = load(given.params)
    try:
        found = inspect(given.file, Path(), params, given.format, columns, given.vote, given.reader)
    except NoLayout as error:  # for rlhf init, which writes a reader with the row in it
        json.dump({"first": error.first}, sys.stdout, default=str)
        raise
    json.dump(found._asdict(), sys.stdout)


if __name__ == "__main__":
    sys.exit(run_command(main, level=logging.WARNING))
