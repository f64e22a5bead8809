import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.commands.data import lines
from cli.main import app
from config.errors import RlhfError

pytestmark = pytest.mark.usefixtures("quick_stages")

ROWS = [
    {"question": f"What is {i} + 1?", "chosen": f"It is {i + 1}.", "rejected": "No idea.", "id": i} for i in range(60)
]


def checked(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["data", "check", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_file_is_described_with_the_settings_that_read_it(project: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "chosen": ""}]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content = json.loads(checked("pairs.jsonl", "--json"))
    told = lines(content, "params.yaml")
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
            "source": {"kind": "file", "path": "pairs.jsonl", "format": "pairs", "columns": {"prompt": "question"}}
        }
    }


def test_prompts_alone_are_a_source_of_prompts(project: Path) -> None:
    rows = "".join(f"How are the {n} of you?;small talk\n" for n in range(60))
    (project / "prompts.csv").write_text(f"prompt;topic\n{rows}")
    told = lines(json.loads(checked("prompts.csv", "--json")), "params.yaml")
    assert told[0] == "prompts.csv: prompts, fields parted by semicolons"
    assert "    prompt_source:" in told


def test_a_file_elsewhere_is_named_by_its_whole_path(project: Path) -> None:
    elsewhere = project.parent / "elsewhere.jsonl"
    elsewhere.write_text("\n".join(map(json.dumps, ROWS)))
    named = os.path.relpath(elsewhere, project)
    assert json.loads(checked(named, "--json"))["source"]["path"] == str(elsewhere)


def refusal(*arguments: str) -> str:
    with pytest.raises(RlhfError) as raised:
        CliRunner().invoke(app, ["data", "check", *arguments], catch_exceptions=False)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_run_that_would_fail_names_the_setting_that_helps(project: Path) -> None:
    rows = [{**row, "chosen": ""} if i < 6 else row for i, row in enumerate(ROWS)]
    (project / "empty.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = refusal("empty.jsonl")
    assert "6 of 60 rows (10.0%) are refused; data.max_quarantine_fraction=0.05. " in said
    assert "Set it to 0.1, or fix the rows." in said
    long = [{**row, "question": f"{row['question']} {'and so on ' * 60}"} for row in ROWS]
    (project / "long.jsonl").write_text("\n".join(map(json.dumps, [*ROWS, *long])))
    said = refusal("long.jsonl")
    assert "60 as their prompts fill model.context_length=96" in said
    assert "raise model.context_length (95% of the prompts have up to " in said
    (project / "one.jsonl").write_text("\n".join([json.dumps(ROWS[0])] * 60))
    assert "no prompt is left for the test split" in refusal("one.jsonl")


def test_pairs_that_are_too_long_are_counted_with_the_length_that_keeps_them(project: Path) -> None:
    rows = [{**row, "chosen": f"{row['chosen']} {'truly ' * 150 if i % 2 else ''}"} for i, row in enumerate(ROWS)]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fit = json.loads(checked("pairs.jsonl", "--json"))["fit"]
    assert (fit["too_long"], fit["pairs"]) == (30, 60)
    assert fit["sequence_tokens"]["p95"] > 150
    told = " ".join(checked("pairs.jsonl").split())
    assert "left out 30 of 60 pairs (50.0%): over reward.max_length=96." in told
    recipe = yaml.safe_load((project / "params.yaml").read_text())
    recipe["model"]["context_length"] = recipe["reward"]["max_length"] = 512
    (project / "longer.yaml").write_text(yaml.safe_dump(recipe))
    fit = json.loads(checked("pairs.jsonl", "--json", "--recipe", "longer.yaml"))["fit"]
    assert fit["too_long"] == 0


def test_a_file_of_which_every_row_is_refused_is_a_mistake(project: Path) -> None:
    rows = [{**row, "chosen": ""} for row in ROWS]
    (project / "empty.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert refusal("empty.jsonl") == "all 60 rows of empty.jsonl are refused: fix them first."


def test_what_cannot_be_read_is_one_line_and_exit_code_2(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"left": "a"}')
    for arguments, words in (
        (["rows.jsonl"], "its columns (left) are in no known layout"),
        (["absent.jsonl"], "absent.jsonl does not exist"),
        (["rows.jsonl", "--format", "pears"], "--format pears"),
        (["rows.jsonl", "--column", "prompt"], "--column prompt: write OURS=THEIRS"),
    ):
        with pytest.raises(RlhfError) as raised:
            CliRunner().invoke(app, ["data", "check", *arguments], catch_exceptions=False)
        assert words in str(raised.value)
        assert raised.value.exit_code == 2
        assert "\n" not in str(raised.value)
