"""The README against the repository: its tree, its commands, its data examples, its links."""

import json
import re
import subprocess
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
RULES = TextRules(max_prompt_chars=1000, max_response_chars=1000, special_tokens=SPECIAL_TOKENS)


def tree() -> list[str]:
    """The paths of the annotated tree."""
    paths: list[str] = []
    folders: list[str] = []
    for line in README.split("```text\n", 1)[1].split("```", 1)[0].splitlines():
        match = re.fullmatch(r"( *)(\S+)\s{2,}(\S.*)", line)
        assert match, f"not of the form `name  what it is`: {line!r}"
        depth, name = len(match[1]) // 2, match[2]
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def tracked() -> list[str]:
    """What git has, or is about to have."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"{ROOT} is not a git checkout, so there is nothing to compare the tree with")
    return [path for path in done.stdout.splitlines() if (ROOT / path).exists()]


def test_everything_the_tree_names_exists() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_the_tree_names_every_top_level_name() -> None:
    top = {path.split("/")[0] + "/" * ("/" in path) for path in tracked()}
    assert sorted(top - set(tree())) == []


def test_the_tree_names_every_module() -> None:
    modules = [
        path
        for path in tracked()
        if path.endswith(".py")
        and not path.startswith("tests/")
        and not path.endswith("__init__.py")
    ]
    assert len(modules) > 80
    assert sorted(set(modules) - set(tree())) == []


def test_the_tree_names_every_recipe_and_document() -> None:
    files = {
        path
        for path in tracked()
        if path.startswith(("recipes/", "docs/")) and path.endswith((".yaml", ".md"))
    }
    assert sorted(files - set(tree())) == []


def test_nothing_is_named_twice() -> None:
    assert len(tree()) == len(set(tree()))


@pytest.mark.parametrize(
    ("form", "pairs", "completions"),
    [("pairs", 2, 2), ("votes", 2, 2), ("trees", 2, 2), ("instructions", 0, 2), ("prompts", 0, 0)],
)
def test_the_example_of_every_format_is_accepted(form: str, pairs: int, completions: int) -> None:
    example = re.search(rf"^`{form}`:\n```jsonl\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert example, form
    rows = [
        SourceRow(i, json.loads(line)) for i, line in enumerate(example[1].splitlines(), start=1)
    ]
    table, columns = Table("README.md", "line", rows), column_names(form, {}, "data.source")
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
    }
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
