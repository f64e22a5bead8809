"""`rlhf label` and `rlhf label-import` in a project of their own."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.commands.label import draw
from cli.main import app
from config.errors import DataError, EnvironmentFault, ParamsError
from labelling.votes import PAIRS_FILE, VOTES_FILE, Pair, Vote, append, read_votes
from tests.conftest import ROOT
from tests.support.parsed_rows import read_as
from training.preparation.sources import rows_in

pytestmark = pytest.mark.usefixtures("quick_stages")

TASK = {"data": {"prompt": "p", "text1": "a", "text2": "b"}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / PAIRS_FILE).parent.mkdir(parents=True)
    (tmp_path / PAIRS_FILE).write_text(
        json.dumps({"prompt": "p", "response1": "a", "response2": "b", "seed": 1}) + "\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rlhf(*arguments: str) -> dict[str, Any]:
    return dict(
        json.loads(
            CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False, standalone_mode=False).stdout
        )
    )


def annotation(side: str, by: int) -> dict[str, Any]:
    return {"completed_by": by, "was_cancelled": False, "result": [{"type": "pairwise", "value": {"selected": side}}]}


def test_the_report_counts_votes_and_agreement(project: Path) -> None:
    pair = Pair("p", "a", "b")
    append(
        VOTES_FILE,
        [
            Vote(pair, "[red]ada", 1, 1),
            Vote(pair, "bob", 1, 2),
            Vote(Pair("q", "a", "b"), "bob", 2),
            Vote(Pair("q", "a", "b"), "[red]ada", 2),
        ],
    )
    result = rlhf("label", "--report")
    assert (
        result["pairs"],
        result["pairs_with_votes"],
        result["votes"],
        result["agreement"],
        result["krippendorff_alpha"],
    ) == (1, 1, 4, 1, 1)
    assert "[red]ada, bob" in CliRunner().invoke(app, ["label", "--report"]).stdout


def test_the_page_is_served_until_it_is_stopped_and_its_votes_are_data(project: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "label", "--annotator", "Ada L.", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        address = json.loads(process.stdout.readline())["url"]
        assert address.endswith("/?annotator=Ada+L.")
        base = address.split("?")[0]
        with urllib.request.urlopen(f"{base}api/next?annotator=Ada+L.", timeout=10) as answer:
            pair = json.load(answer)["pair"]
        body = json.dumps({"annotator": "Ada L.", "pair": pair["key"], "choice": "left"}).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{base}api/vote", body, {"Content-Type": "application/json"}), timeout=10
        ).close()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert json.loads(rest)["votes"] == 1
    (example,) = read_as("votes", *rows_in(project / VOTES_FILE)).examples
    assert example.pairs[0].chosen == pair["left"]


def test_drawing_that_fails_is_one_line_and_keeps_the_pairs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = PAIRS_FILE.read_bytes()
    # a package of that name in the folder hides ours from `python -m`
    (project / "training").mkdir()
    (project / "training" / "__init__.py").write_text("")
    (project / "training" / "pairs.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(EnvironmentFault, match="exit code 2"):
        draw(project, 5, 1.0, None)
    assert PAIRS_FILE.read_bytes() == before


def test_an_import_adds_each_vote_once_and_quarantines_the_rest(project: Path) -> None:
    export = project / "export.json"
    export.write_text(json.dumps([TASK | {"annotations": [annotation("left", 1), annotation("right", 2)]}, {"id": 5}]))
    first, again = (rlhf("label-import", "export.json", "--format", "label-studio") for _ in range(2))
    counts = ("imported", "unchanged", "refused")
    assert [first[name] for name in counts] == [2, 0, 1]
    assert [again[name] for name in counts] == [0, 2, 1]
    assert [vote.vote for vote in read_votes(VOTES_FILE)] == [1, 2]
    (refused,) = [json.loads(line) for line in (project / first["quarantine"]).read_text().splitlines()]
    assert (refused["source"], refused["number"], refused["reason"], refused["original"]) == (
        "export.json",
        2,
        "not_a_task",
        {"id": 5},
    )
    export.write_text(json.dumps([TASK | {"annotations": [annotation("right", 1)]}]))
    assert rlhf("label-import", "export.json", "--format", "label-studio")["imported"] == 1
    assert [vote.vote for vote in read_votes(VOTES_FILE)] == [1, 2, 2]
    assert not (project / first["quarantine"]).exists()


def test_an_import_without_a_vote_is_an_error_that_names_the_reason(project: Path) -> None:
    (project / "export.json").write_text(json.dumps([{"fields": {"a": "b"}, "responses": {}}]))
    with pytest.raises(DataError, match="1 missing_column"):
        rlhf("label-import", "export.json", "--format", "argilla")
    with pytest.raises(ParamsError, match="has no ="):
        rlhf("label-import", "export.json", "--format", "argilla", "--column", "prompt")
    assert not VOTES_FILE.exists()


def test_what_was_asked_of_new_pairs_reaches_the_process_that_draws_them(project: Path) -> None:
    said = project / "arguments.json"
    # a package of that name in the folder hides ours from `python -m`
    (project / "training" / "inference").mkdir(parents=True)
    for package in ("training", "training/inference"):
        (project / package / "__init__.py").write_text("")
    (project / "training" / "inference" / "pairs.py").write_text(
        f"import json, sys\nopen({str(said)!r}, 'w').write(json.dumps(sys.argv[1:]))\nraise SystemExit(3)\n"
    )
    typed = ["label", "--new", "7", "--temperature", "0.5", "--seed", "11"]
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *typed],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "exit code 3" in done.stderr) == (2, True)
    assert json.loads(said.read_text()) == ["--count", "7", "--temperature", "0.5", "--seed", "11"]
