"""`rlhf label` and `rlhf label-import`: people compare responses, and their votes become data."""

import json
import signal
import subprocess
import sys
import threading
import urllib.parse
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cli.project import project_root, typed_path
from cli.terminal import Terminal
from config.errors import EnvironmentFault, ParamsError
from config.inputs import JUDGE_VOTES

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

FIRST_PAIRS = 50
"""Pairs drawn if there are none yet."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs instead of a table.")]


def label(
    new: Annotated[
        int | None, typer.Option("--new", min=1, help="First draw this many new pairs from the aligned model.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of new pairs.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of new pairs; without it, one that was not used yet.")] = None,
    annotator: Annotated[str | None, typer.Option(help="Name to start with; the page asks otherwise.")] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only show progress and agreement.")] = False,
    judge: Annotated[
        bool,
        typer.Option(
            "--judge",
            help="Compare the replies of SFT and aligned model that the last evaluation kept, "
            "or of champion and challenger where retraining waits for that. Nothing trains on these votes.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare pairs of responses on a local page, by keyboard. The next run trains on the votes, or with --judge is
    judged by them.
    """
    from labelling.judging import JUDGE_PAIRS, pairs_to_judge
    from labelling.server import Session, serve, url
    from labelling.votes import PAIRS_FILE, VOTES_FILE, annotator_name

    root = project_root()
    pairs_file, votes_file = (JUDGE_PAIRS, JUDGE_VOTES) if judge else (PAIRS_FILE, VOTES_FILE)
    if report:
        _report(root, as_json, pairs_file, votes_file)
        return
    name = None if annotator is None else annotator_name(annotator)
    if judge:
        pairs_to_judge(root)
    elif new or not (root / PAIRS_FILE).exists():
        draw(root, new or FIRST_PAIRS, temperature, seed)
    with serve(Session(root / pairs_file, root / votes_file), port) as server:
        _stop_on_signals(server)
        address = url(server) + ("?" + urllib.parse.urlencode({"annotator": name}) if name else "")
        typer.echo(
            json.dumps({"url": address, "votes": str(votes_file)})
            if as_json
            else f"Label on {address}\nCtrl-C ends it; every vote is in {votes_file} at once."
        )
        sys.stdout.flush()
        if open_page:
            webbrowser.open(address)
        server.serve_forever(poll_interval=0.1)
    _report(root, as_json, pairs_file, votes_file)


def _stop_on_signals(server: "ThreadingHTTPServer") -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        # from another thread: shutdown waits for the loop that the signal interrupts
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())


def draw(root: Path, count: int, temperature: float, seed: int | None) -> None:
    """Draw new pairs in a separate process. Raises EnvironmentFault if it fails; existing pairs are kept."""
    command = [
        sys.executable,
        "-m",
        "training.inference.pairs",
        "--count",
        str(count),
        "--temperature",
        str(temperature),
    ]
    command += [] if seed is None else ["--seed", str(seed)]
    code = subprocess.run(command, cwd=root, stdout=sys.stderr, check=False).returncode
    if code:
        raise EnvironmentFault(
            f"no pairs were drawn (exit code {code}), the line above says why; those drawn before are unchanged."
        )


def label_import(
    file: Annotated[Path, typer.Argument(parser=typed_path, metavar="FILE", help="The exported JSON file.")],
    form: Annotated[str, typer.Option("--format", help="label-studio or argilla.")],
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="OURS=THEIRS",
            help="Field of the export that holds prompt, response1 or response2; repeatable.",
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="The question that asks for the preference, if several could be it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import votes from a Label Studio or Argilla export into the votes file."""
    from labelling.intake import take_in

    taken_in = take_in(project_root(), file, form, _columns(column or []), question)
    if as_json:
        typer.echo(json.dumps({key: value for key, value in taken_in._asdict().items() if key != "reasons"}))
        return
    typer.echo(
        f"{taken_in.imported} votes of {file} are in {taken_in.votes}; {taken_in.unchanged} were "
        "there already or replaced in the same file."
    )
    if taken_in.agreement is not None:
        typer.echo(f"Annotators agree in {taken_in.agreement:.1%} of couples of votes on a pair.")
    if taken_in.refused:
        typer.echo(f"{taken_in.refused} refused: {taken_in.reasons}. All of them are in {taken_in.quarantine}.")


def _columns(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ParamsError(f"--column {pair} has no =. Write --column response1=NAME.")
    return {ours: theirs for ours, _, theirs in (pair.partition("=") for pair in pairs)}


def _report(root: Path, as_json: bool, pairs_file: Path, votes_file: Path) -> None:
    from labelling.summary import summary
    from labelling.votes import read_pairs, read_votes

    counts = summary(read_pairs(root / pairs_file), read_votes(root / votes_file))
    if as_json:
        typer.echo(json.dumps(counts, indent=2))
        return
    console = Terminal()
    console.print(
        f"{counts['votes']} votes; {counts['pairs_with_votes']} of {counts['pairs']} pairs have one, "
        f"{counts['pairs_with_several_votes']} have several."
    )
    if counts["annotators"]:
        console.print(_annotators(counts["annotators"]))
    if counts["agreement"] is None:
        console.print("Agreement: no pair has votes of two annotators yet.")
        return
    console.print(
        f"Agreement: {counts['agreement']:.1%} of couples of votes on a pair; Krippendorff's alpha "
        f"{_number(counts['krippendorff_alpha'])}."
    )
    console.print(_couples(counts["couples"]))


def _annotators(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("annotator", "votes", "ties", "skipped", "chose left")
    for row in rows:
        table.add_row(
            _plain(row["annotator"]),
            str(row["votes"]),
            str(row["ties"]),
            str(row["skipped"]),
            "" if row["left"] is None else f"{row['left']:.0%}",
        )
    return table


def _couples(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("annotators", "pairs of both", "agreement", "Cohen's kappa")
    for row in rows:
        table.add_row(
            _plain(f"{row['first']}, {row['second']}"),
            str(row["units"]),
            f"{row['agreement']:.1%}",
            _number(row["kappa"]),
        )
    return table


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # rich would read brackets as markup


def _number(value: float | None) -> str:
    return "not defined (all votes are the same)" if value is None else f"{value:.2f}"
