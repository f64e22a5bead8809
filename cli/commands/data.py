"""`rlhf data check`: inspect a data file before training on it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.project import project_root, typed_path
from config.errors import DataError, ParamsError, RlhfError
from config.terminal_text import visible
from config.workspace.feedback import SNAPSHOT, renew_snapshot

app = typer.Typer(no_args_is_help=True, help="Look at data before anything is trained on it.")

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LENGTHS = {"prompt": "prompts", "reply": "replies"}
FEEDBACK_FORMAT = "feedback"
CUT_AT = 200
"""Characters of a prompt or reply shown."""

VoteOption = Annotated[
    str | None, typer.Option(help="What a winner's number means: index0, index1, negative-first or positive-first.")
]
ReaderOption = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:FUNCTION", help="A function of your own that reads the file: see docs/data.md."),
]


@app.callback()
def data() -> None:
    """Inspect data before training on it."""


@app.command()
def check(
    file: Annotated[
        str | None, typer.Argument(help="A jsonl, json, csv or parquet file, also .gz or .zst, or its URL.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="pairs, votes ... or a layout of published data; else the columns say."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="OURS=THEIRS", help="Column of the file that holds prompt, chosen ...; repeatable."
        ),
    ] = None,
    vote: VoteOption = None,
    reader: ReaderOption = None,
    recipe: Annotated[
        Path, typer.Option("--recipe", parser=typed_path, metavar="FILE", help="Whose model and limits are meant.")
    ] = Path("params.yaml"),
    feedback: Annotated[
        bool, typer.Option("--feedback", help="What users said of served replies, as the next run will read it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Inspect a data file: format, refused rows and why, lengths, duplicates, baselines for the reward model, rows as
    a model sees them, and the settings that read it. Exits with 2 if a run on it would fail.
    """
    root = project_root()
    if feedback:
        renew_snapshot(root)
        file, form = str(root / SNAPSHOT), FEEDBACK_FORMAT
    if file is None:
        raise ParamsError("name a file to check, or --feedback.")
    path = None if "://" in file else typed_path(file)
    named = file if path is None else _from_root(root, Path(os.path.normpath(root / path)))
    inspection = inspected(root, named, form, column or [], recipe, vote, reader)
    typer.echo(json.dumps(inspection, indent=2) if as_json else visible("\n".join(lines(inspection, str(recipe)))))
    if (
        inspection["fit"] is None
        and sum(refusal["rows"] for refusal in inspection["refused"].values()) == inspection["rows"]
    ):
        raise DataError(f"all {inspection['rows']:,} rows of {file} are refused: fix them first.")
    if inspection["fit"] is not None and inspection["fit"]["fault"]:
        raise DataError(f"a run on {file} with {recipe} would fail: {inspection['fit']['fault']}")


def _from_root(root: Path, path: Path) -> str:
    """The path as params.yaml would write it."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


class UnknownLayout(DataError):
    """A file that is in no known layout."""

    def __init__(self, message: str, first: Any) -> None:
        super().__init__(message)
        self.first = first
        """Its first row."""


def inspected(
    root: Path,
    file: str,
    form: str | None,
    columns: list[str],
    recipe: Path = Path("params.yaml"),
    vote: str | None = None,
    reader: str | None = None,
) -> dict[str, Any]:
    """Inspect a file in a separate process, with the code of the data stage.

    Raises UnknownLayout, or RlhfError with the line of the process.
    """
    command = [sys.executable, "-m", "training.preparation.inspection", file]
    command += ["--params", str(root / recipe)]
    command += ["--format", form] if form else []
    command += [item for column in columns for item in ("--columns", column)]
    command += ["--vote", vote] if vote else []
    command += ["--reader", reader] if reader else []
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1]
        if done.stdout:
            raise UnknownLayout(last_line, json.loads(done.stdout)["first"])
        fault = RlhfError(last_line)
        fault.exit_code = done.returncode
        raise fault
    return dict(json.loads(done.stdout))


def lines(inspection: dict[str, Any], recipe: str) -> list[str]:
    """The table for people."""
    parted = DELIMITERS.get(inspection["delimiter"] or "")
    return [
        f"{inspection['file']}: {inspection['format']}" + (f", fields parted by {parted}" if parted else ""),
        *_counts(inspection),
        *_refused(inspection["refused"], inspection["rows"]),
        *[
            f"{LENGTHS[name]:<13} {words['mean']:.0f} words on average, 95% below {words['p95']:.0f}, "
            f"the longest {words['max']:.0f}"
            for name, words in inspection["words"].items()
        ],
        *_labels(inspection),
        *([f"not read      {', '.join(inspection['unread'])}"] if inspection["unread"] else []),
        *[f"warning       {warning}" for warning in inspection["warnings"]],
        *(["", "The first pairs:", *inspection["side_by_side"]] if inspection["side_by_side"] else [""]),
        *_fit(inspection, recipe),
        "",
        "As a model will see it:",
        *[
            line
            for i, (prompt, reply) in enumerate(inspection["samples"], start=1)
            for line in (f"  {i}. {_cut(prompt)}", *([f"     -> {_cut(reply)}"] if reply else []))
        ],
        "",
        "In params.yaml:",
        *_settings(inspection),
    ]


def _counts(inspection: dict[str, Any]) -> list[str]:
    gives = {
        "pairs": inspection["pairs"],
        "good replies": inspection["good"],
        "bad replies": inspection["bad"],
        "demonstrations": inspection["demonstrations"],
        "prompts": inspection["prompts"],
    }
    line = ", ".join(f"{count:,} {name}" for name, count in gives.items() if count)
    good, bad = inspection["good"], inspection["bad"]
    rows = "messages" if inspection["format"] == "trees" else "rows"
    extra = [
        f"{inspection[key]:,} {words}"
        for key, words in (
            ("ties", "ties, which give no pair"),
            ("duplicates", "duplicates, which are dropped"),
            ("contradictory_pairs", "pairs that contradict one another"),
        )
        if inspection[key]
    ]
    return [
        f"{inspection['rows']:,} {rows} give {line}; {inspection['test_prompts']:,} prompts are held out",
        *([f"among them     {'; '.join(extra)}"] if extra else []),
        *(
            [f"KTO            a good reply weighs {bad / good:.2f}, a bad one 1 (kto.desirable_weight: null)"]
            if good and bad
            else []
        ),
    ]


def _refused(refused: dict[str, dict[str, Any]], rows: int) -> list[str]:
    if not refused:
        return ["refused       none"]
    return [
        f"refused       {refusal['rows']:,} of {rows:,}: {reason} (first: {refusal['first']}: {refusal['detail']})"
        for reason, refusal in refused.items()
    ]


def _fit(inspection: dict[str, Any], recipe: str) -> list[str]:
    """How many rows are too long for the model of a recipe."""
    fit = inspection["fit"]
    if fit is None:
        return [f"With {recipe}: lengths in tokens are not known: {inspection['fit_unknown']}"]
    prompt, sequence = fit["prompt_tokens"], fit["sequence_tokens"]
    lines = [
        f"With {recipe}, whose model reads {fit['context_length']} tokens:",
        f"prompts       95% up to {prompt['p95']:,} tokens, the longest {prompt['max']:,}",
        f"with reply    95% up to {sequence['p95']:,} tokens, the longest {sequence['max']:,}",
        f"refused       {fit['refused'] / fit['rows']:.1%} of the rows; data.max_quarantine_fraction={fit['limit']:g}",
    ]
    if fit["too_long"]:
        lines.append(
            f"left out      {fit['too_long']:,} of {fit['pairs']:,} pairs ({fit['too_long'] / fit['pairs']:.1%}): "
            f"over {fit['setting']}={fit['max_length']}. To keep 95%, raise it and"
        )
        lines.append(f"              model.context_length to {sequence['p95']}.")
    lost = [(fit["cut"], "cut"), (fit["dropped"], "left out")]
    if any(count for count, _ in lost):
        losses = " and ".join(f"{count:,} {said}" for count, said in lost if count)
        lines.append(
            f"SFT           {losses} of {fit['demonstrations']:,} demonstrations: over "
            f"sft.max_length={fit['sft_max_length']}"
        )
    return lines


def _labels(inspection: dict[str, Any]) -> list[str]:
    lines = []
    if inspection["chosen_longer"] is not None:
        lines.append(f"labels        the longer reply wins {inspection['chosen_longer']:.0%}")
        if inspection["chosen_first"] is not None:
            lines[-1] += f", the first shown {inspection['chosen_first']:.0%}"
    names = {"longer_wins": "the longer reply", "bow": "a bag of words"}
    lines += [
        f"to beat       {names[name]}: {value:.1%} [{low:.1%}, {high:.1%}] of held-out pairs"
        for name, (value, low, high) in inspection["baselines"].items()
    ]
    return lines


def _cut(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= CUT_AT else f"{shown[:CUT_AT]} ..."


def _settings(inspection: dict[str, Any]) -> list[str]:
    from config.load import to_yaml  # imported late: listing the commands does not need it

    block: dict[str, Any] = {"data": {"source": inspection["source"]}}
    if inspection["format"] == FEEDBACK_FORMAT:
        block = {"data": {"feedback_source": inspection["file"]}}
    if inspection["fit"] is not None and inspection["fit"]["enough"] is not None:
        block["data"]["max_quarantine_fraction"] = inspection["fit"]["enough"]
    serves = inspection["pairs"] or inspection["format"] not in ("instructions", "prompts")
    if not serves:
        setting = "sft_source" if inspection["format"] == "instructions" else "prompt_source"
        block = {"data": {setting: inspection["source"]}}
    return [f"  {line}" for line in to_yaml(block).splitlines()]
