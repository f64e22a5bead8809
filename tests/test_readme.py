"""README and docs against the repository: tree, commands, data examples, links."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from config.load import load
from tests.conftest import ROOT
from training.modeling.tokenizer import SPECIAL_TOKENS
from training.preparation.cleaning import TextRules
from training.preparation.formats import column_names, parse_rows
from training.preparation.helpdesk import gold_score
from training.preparation.sources import SourceRow, Table
from training.preparation.splits import split_of
from training.preparation.trees import parse_trees

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMATS = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
RULES = TextRules(max_prompt_chars=1000, max_response_chars=1000, special_tokens=SPECIAL_TOKENS)


def test_the_annotated_tree_is_written_from_the_files() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip(f"{ROOT} is not a git checkout, so there is nothing to compare the tree with")
    spec = spec_from_file_location("tree", ROOT / "docs" / "tree.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert written == module.tree(), "docs/tree.md is old: python docs/tree.py"


def test_the_readme_stays_a_front_page() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize(
    ("form", "pairs", "completions"),
    [("pairs", 2, 2), ("votes", 2, 2), ("trees", 2, 2), ("instructions", 0, 2), ("prompts", 0, 0)],
)
def test_the_example_of_every_format_is_accepted(form: str, pairs: int, completions: int) -> None:
    example = re.search(rf"^`{form}`:\n```jsonl\n(.*?)```", FORMATS, re.MULTILINE | re.DOTALL)
    assert example, form
    rows = [
        SourceRow(i, json.loads(line)) for i, line in enumerate(example[1].splitlines(), start=1)
    ]
    table, columns = Table("docs/data.md", "line", rows), column_names(form, {}, "data.source")
    parsed = (
        parse_trees(table, columns, RULES)
        if form == "trees"
        else parse_rows(table, form, columns, RULES)
    )
    assert parsed.refusals == []
    assert len(parsed.examples) == 2
    assert sum(len(found.pairs) for found in parsed.examples) == pairs
    assert sum(len(found.completions) for found in parsed.examples) == completions


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_links_between_documents_lead_somewhere() -> None:
    for document in documents():
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_rlhf_command_in_the_documents_exists() -> None:
    from cli.main import app

    known = {
        command.name or (command.callback.__name__ if command.callback else "")
        for command in app.registered_commands
    } | {group.name for group in app.registered_groups}
    for document in documents():
        for command in re.findall(
            r"(?:^|`|/)rlhf ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert command in known, f"{document.name}: rlhf {command}"


def test_the_prompt_of_the_tour_is_held_out_and_its_reply_earns_all_gold() -> None:
    prompt, reply = re.findall(
        r"^    (\S.*)$", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), re.MULTILINE
    )[:2]
    assert split_of(prompt, load(ROOT / "recipes" / "demo.yaml").data.test_fraction) == "test"
    assert gold_score(prompt, reply) == pytest.approx(1.0)


def test_every_test_that_the_page_on_correctness_names_exists() -> None:
    page = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(tests/[\w/]+\.py)", page))
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py)", page))
    assert len(named) > 40
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert sorted(named - set(re.findall(r"def (test_\w+)", sources))) == []
