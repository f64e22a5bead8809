"""README and docs against the repository: commands, data examples, links."""

import json
import re
from pathlib import Path

import pytest

from config.load import load
from tests.conftest import ROOT
from tests.support.parsed_rows import read_as
from training.modeling.tokenizer import SPECIAL_TOKENS
from training.preparation.cleaning import TextRules
from training.preparation.layouts import LAYOUTS
from training.preparation.splits import split_of
from training.worlds.helpdesk import gold_score

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMATS = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
RULES = TextRules(max_prompt_chars=1000, max_response_chars=1000, special_tokens=SPECIAL_TOKENS)


def test_the_readme_stays_a_front_page() -> None:
    assert len(README.splitlines()) <= 200


def test_the_map_of_the_readme_has_every_package_and_no_other_path() -> None:
    shown = re.search(r"## The code\n.*?```\n(.*?)```", README, re.DOTALL)
    assert shown
    paths = [line.split()[0] for line in shown[1].splitlines() if line.strip()]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {path.rstrip("/").split("/")[0] for path in paths} == set()


@pytest.mark.parametrize(
    ("form", "pairs", "completions"),
    [
        ("pairs", 2, 2),
        ("votes", 2, 2),
        ("ranked", 2, 2),
        ("rated", 2, 2),
        ("ratings", 0, 1),
        ("trees", 2, 2),
        ("instructions", 0, 2),
        ("prompts", 0, 0),
    ],
)
def test_the_example_of_every_format_is_accepted(form: str, pairs: int, completions: int) -> None:
    example = re.search(rf"^`{form}`:\n```jsonl\n(.*?)```", FORMATS, re.MULTILINE | re.DOTALL)
    assert example, form
    rows = map(json.loads, example[1].splitlines())
    parsed = read_as(form, *rows, rules=RULES)
    assert parsed.refusals == []
    assert len(parsed.examples) == 2
    assert sum(len(example.pairs) for example in parsed.examples) == pairs
    assert sum(len(example.completions) for example in parsed.examples) == completions


def test_every_published_layout_is_in_the_documentation() -> None:
    rows = [f"| [{item.name}]({item.card}) | `{item.form}` | {item.about} |" for item in LAYOUTS]
    assert [row for row in rows if row not in FORMATS.splitlines()] == []


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_links_between_documents_lead_somewhere() -> None:
    for document in documents():
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_rlhf_command_in_the_documents_exists() -> None:
    from cli.main import app

    commands = {
        command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands
    } | {group.name for group in app.registered_groups}
    for document in documents():
        for command in re.findall(r"(?:^|`|/)rlhf ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE):
            assert command in commands, f"{document.name}: rlhf {command}"


def test_the_prompt_of_the_tour_is_held_out_and_its_reply_earns_all_gold() -> None:
    prompt, reply = re.findall(r"^    (\S.*)$", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), re.MULTILINE)[
        :2
    ]
    assert split_of(prompt, load(ROOT / "recipes" / "demo.yaml").data.test_fraction) == "test"
    assert gold_score(prompt, reply) == pytest.approx(1.0)


def test_every_file_that_contributing_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:tests|benchmarks|config|costs|training)/[\w/]+\.(?:py|yaml))", page))
    assert len(files) > 30
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
