import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.data import lines
from cli.main import app
from config.errors import RlhfError

ROWS = [
    {"question": f"What is {i} + 1?", "chosen": f"It is {i + 1}.", "rejected": "No idea.", "id": i}
    for i in range(60)
]


def checked(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["data", "check", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_file_is_described_with_the_settings_that_read_it(project: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "chosen": ""}]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = json.loads(checked("pairs.jsonl", "--json"))
    told = lines(found)
    assert checked("pairs.jsonl").splitlines() == "\n".join(told).splitlines()
    assert told[0] == "pairs.jsonl: pairs"
    assert told[1].startswith("61 rows give 60 pairs, 60 demonstrations, 60 prompts; ")
    assert "refused       1 of 61: empty (first: pairs.jsonl line 61, chosen: empty text)" in told
    assert "not read      id" in told
    assert any("What is 0 + 1?" in line for line in told)
    assert "     -> It is 1." in told
    begin = told.index("In params.yaml:") + 1
    assert yaml.safe_load("\n".join(told[begin:])) == {
        "data": {
            "source": {
                "kind": "file",
                "path": "pairs.jsonl",
                "format": "pairs",
                "columns": {"prompt": "question"},
            }
        }
    }


def test_prompts_alone_are_a_source_of_prompts(project: Path) -> None:
    (project / "prompts.csv").write_text("prompt;topic\nHow are you?;small talk\n")
    told = lines(json.loads(checked("prompts.csv", "--json")))
    assert told[0] == "prompts.csv: prompts, fields parted by semicolons"
    assert "    prompt_source:" in told


def test_a_file_elsewhere_is_named_by_its_whole_path(project: Path) -> None:
    elsewhere = project.parent / "elsewhere.jsonl"
    elsewhere.write_text(json.dumps(ROWS[0]))
    named = os.path.relpath(elsewhere, project)
    assert json.loads(checked(named, "--json"))["source"]["path"] == str(elsewhere)


def test_what_can_not_be_read_is_one_line_and_exit_code_2(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"left": "a"}')
    for arguments, words in (
        (["rows.jsonl"], "its columns (left) fit no format"),
        (["absent.jsonl"], "absent.jsonl does not exist"),
        (["rows.jsonl", "--format", "pears"], "--format pears"),
        (["rows.jsonl", "--column", "prompt"], "--column prompt: write OURS=THEIRS"),
    ):
        with pytest.raises(RlhfError) as raised:
            CliRunner().invoke(app, ["data", "check", *arguments], catch_exceptions=False)
        assert words in str(raised.value)
        assert raised.value.exit_code == 2
        assert "\n" not in str(raised.value)
