"""Inspects a data file before training: format and columns, refused rows and reasons, and the `data.source` block that
reads it.

python -m training.preparation.inspection FILE [--format F] [--columns NAME=COLUMN ...]
    -> one JSON object on stdout, the fields of `Inspection`
"""

import argparse
import json
import logging
import sys
from array import array
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from config.errors import ModelError, ParamsError
from config.load import load
from config.schema import Params
from config.sections.data import FileSource, PythonSource, Vote
from training.modeling.tokenizer import SMALLEST_VOCABULARY, prompt_text, trained_tokenizer
from training.preparation.cleaning import Quarantine, TextRules
from training.preparation.columns import (
    BEFORE,
    COLUMNS,
    NoLayout,
    Recognised,
    check_columns,
    column_names,
    columns_of,
    recognised,
)
from training.preparation.examples import Need
from training.preparation.fit import fit
from training.preparation.formats import USES, Example, replies_of
from training.preparation.layouts import FORMATS, MESSAGES, ORDERS, PYTHON, REPLIES
from training.preparation.prepared import Datasets, Passes, base_tokenizer, text_rules
from training.preparation.sources import csv_delimiter, read_file, read_python
from training.preparation.splits import SPLITS
from training.preparation.summary import baselines, label_balance, side_by_side
from training.preparation.vocabulary import train_tokenizer
from training.preparation.votes import ANNOTATOR, VOTE
from training.process.command import run_command

FEEDBACK = "feedback"
"""Format of data.feedback_source: ratings and pairs in our own rows."""
FEWEST_PAIRS = 20
"""Fewest pairs to train or test on for a meaningful baseline."""


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
    good: int
    """Replies that are rated good, and bad."""
    bad: int
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
    """Inspect a local file or URL; `form`, `columns` and `vote` override what is detected, and a `reader` of one's own
    reads it.

    Raises DataError if it cannot be read or is in no known layout, ParamsError for a column that the format does not
    have.
    """
    source: FileSource | PythonSource
    if reader is not None:
        source = PythonSource(kind="python", path=reader, files=[path])
        table, form, given = read_python(source, root, "data.source"), PYTHON, {}
        readable: Mapping[str, str] = {}
        name, present = None, list[str]()
    else:
        source = FileSource(kind="file", path=path, format="pairs", columns={})
        table = read_file(source, root, "data.source")
        layout = Recognised(PYTHON, {}) if form == FEEDBACK else recognised(table, form, columns)
        form, vote, name = layout.form, vote or layout.vote, layout.name
        usual, present = COLUMNS.get(form, {}), columns_of(table)
        given = {
            ours: theirs
            for ours, theirs in layout.columns.items()
            if usual.get(ours) != theirs and not (name and ours in BEFORE and theirs not in present)
        }
        readable = column_names(form, given, "data.source")
        check_columns(table, form, readable, "data.source")
        update = {"format": form, "columns": given, "vote": vote}
        source = source.model_copy(update=update)
    unknown: str | None = None
    base: PreTrainedTokenizerBase | None = None
    try:
        base = base_tokenizer(params)
    except ModelError as error:
        unknown = str(error)
    rules = (
        text_rules(params, base)
        if unknown is None
        else TextRules(params.data.max_prompt_chars, params.data.max_response_chars, ())
    )
    without_judge = {"judge_fraction": 0.0, "validation_fraction": 0.0}
    with TemporaryDirectory() as folder:
        quarantine = Quarantine(Path(folder) / "quarantine.jsonl")
        passes = Passes(quarantine, params.data.model_copy(update=without_judge))
        accepted = passes.read([Need(table, form, readable, USES, vote)], rules)
        [examples] = accepted
        if unknown is not None:  # to count rows and duplicates, not tokens
            tokenizer: PreTrainedTokenizerBase = trained_tokenizer([], SMALLEST_VOCABULARY)
        else:
            tokenizer = base or train_tokenizer(accepted, params)
        # ModelError: a run would fail in the same way
        datasets = passes.write(accepted, tokenizer, sys.maxsize)
        fits = fit(datasets, quarantine.total, examples.rows_read, params)
        prompts = [datasets.splits["prompts"][name].rows for name in SPLITS]
        pairs, demonstrations = (
            sum(split.rows for split in datasets.splits[use].values()) + datasets.duplicates[use]
            for use in ("preference", "sft")
        )
        labels = [rating.label for example in examples for rating in example.ratings]
        kind = "preference" if pairs else "ratings" if labels else "sft" if demonstrations else "prompts"
        balance = label_balance(datasets)
        return Inspection(
            file=path,
            format=FEEDBACK if reader is None and form == PYTHON else form,
            layout=name,
            delimiter=_delimiter(root / path),
            columns=given,
            unread=[] if form not in COLUMNS or form == "trees" else _unread(present, form, readable),
            rows=examples.rows_read,
            refused={
                reason: {"rows": count, "first": str(first.origin), "detail": first.detail}
                for reason, count in quarantine.counts.most_common()
                for first in [quarantine.first[reason]]
            },
            warnings=examples.reading.warnings,
            prompts=sum(prompts),
            test_prompts=prompts[SPLITS.index("test")],
            pairs=pairs,
            demonstrations=demonstrations,
            good=sum(labels),
            bad=len(labels) - sum(labels),
            ties=examples.reading.ties,
            duplicates=datasets.duplicates[kind],
            contradictory_pairs=datasets.contradictory_pairs(),
            words=_words(examples),
            chosen_longer=balance["chosen_longer"],
            chosen_first=balance["chosen_first"],
            baselines=_baselines(datasets),
            samples=[_as_seen(example, params) for example in islice(examples, 3)],
            side_by_side=side_by_side(examples),
            source=source.model_dump(mode="json"),
            fit=fits._asdict() if unknown is None and examples.accepted else None,
            fit_unknown=unknown or (None if examples.accepted else "no row can be read."),
        )


def _delimiter(path: Path) -> str | None:
    if path.suffix.lower() != ".csv" or not path.is_file():  # not of a compressed one
        return None
    with path.open(encoding="utf-8-sig") as file:
        return csv_delimiter(file)


def _unread(present: Iterable[str], form: str, columns: Mapping[str, str]) -> list[str]:
    """The columns that no reader looks at."""
    read = {name.strip() for theirs in columns.values() for name in theirs.split(",")}
    read |= {"votes": {ANNOTATOR, VOTE}, "ranked": {*REPLIES, *ORDERS}}.get(form, set())
    if form == "instructions" and columns["prompt"] not in present:
        read |= set(MESSAGES)
    return [name for name in present if name not in read]


# ---------------------------------------------------------------- rows


def _words(examples: Iterable[Example]) -> dict[str, dict[str, float]]:
    lengths = {"prompt": array("i"), "reply": array("i")}
    for example in examples:
        lengths["prompt"].append(len(prompt_text(example.prompt).split()))
        texts = [text for pair in example.pairs for text in pair[:2]] or [rating[0] for rating in example.ratings]
        lengths["reply"].extend(len(text.split()) for text in texts or example.completions)
    return {
        name: {"mean": float(np.mean(counts)), "p95": float(np.percentile(counts, 95)), "max": max(counts)}
        for name, counts in lengths.items()
        if counts
    }


def _baselines(datasets: Datasets) -> dict[str, list[float]]:
    """Baselines of the reward model on held-out prompts."""
    if min(datasets.splits["preference"][name].rows for name in SPLITS) < FEWEST_PAIRS:
        return {}
    return {name: list(proportion) for name, proportion in baselines(datasets).items() if proportion}


def _as_seen(example: Example, params: Params) -> tuple[str, str]:
    prompt = (
        params.data.prompt_template.replace("{prompt}", example.prompt)
        if isinstance(example.prompt, str)
        else prompt_text(example.prompt)
    )
    reply = next((pair.chosen for pair in example.pairs), next(iter(replies_of(example)), ""))
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
    options = parser.parse_args()
    for item in options.columns:
        if "=" not in item:
            raise ParamsError(f"--column {item}: write OURS=THEIRS, such as prompt=question.")
    for option, value, choices in (
        ("--format", options.format, [*list(FORMATS)[:-1], FEEDBACK]),
        ("--vote", options.vote, get_args(Vote)),
    ):
        if value is not None and value not in choices:
            raise ParamsError(f"{option} {value} is not one of {', '.join(choices)}.")
    columns = dict(item.split("=", 1) for item in options.columns)
    params = load(options.params)
    try:
        inspection = inspect(options.file, Path(), params, options.format, columns, options.vote, options.reader)
    except NoLayout as error:  # for rlhf init, which writes a reader with the row in it
        json.dump({"first": error.first}, sys.stdout, default=str)
        raise
    json.dump(inspection._asdict(), sys.stdout)


if __name__ == "__main__":
    sys.exit(run_command(main, level=logging.WARNING))
