"""Phrases that a native speaker would not write stay out of the repository."""

import ast
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

BANNED = {
    r"can not\b": "cannot",
    r"can_not": "cannot",
    r"without a word": "without an error message",
    r"nobody is there to ask": "stdin is not a terminal",
    r"goes the way of": "follows the trajectory of",
    r"\bheirs\b": "successors",
    r"\binsisted\b": "force",
    r"\bof_first\(": "broadcast_from_rank0",
    r"bring_up_to_date": "run_stage_task",
    r"stands elsewhere": "duplicates",
    r"where nothing was said": "by default",
    r"\bat work\b": "running",
    r"is none of ": "is not one of",
    r"\bfor ever\b": "forever",
    r"(is as it was|are as they were)\b": "unchanged",
    r"\bstands? on\b": "is based on",
    r"tells none apart": "cannot tell them apart",
}
"""Pattern -> what to write instead."""
FILES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "*.html"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    if not name.startswith(("data/", "tests/fixtures/", "tests/test_language.py"))
]


@pytest.mark.parametrize("pattern", BANNED)
def test_no_file_has_a_banned_phrase(pattern: str) -> None:
    result = [
        f"{name}:{number}: write {BANNED[pattern]!r}"
        for name in FILES
        if (ROOT / name).exists()
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert result == []


NAMES = {"found", "own", "each", "made", "one", "known", "asked", "taken", "drawn", "left"}
"""They say how a value was come by. A value is named for what it is."""
ALLOWED = {("labelling/votes.py", "left")}
"""What a vote's file calls it: the number of the reply that was shown on the left."""
PRODUCT = [
    name for name in FILES if name.endswith(".py") and not name.startswith(("tests/", "benchmarks/", "recipes/"))
]


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every variable, attribute, argument and function."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
            ):
                yield node.lineno, name


def test_values_and_functions_are_named_for_what_they_are() -> None:
    vague = [
        f"{file}:{line}: {name}"
        for file in PRODUCT
        if (ROOT / file).exists()
        for line, name in bound_names(ast.parse((ROOT / file).read_text("utf-8")))
        if (name.strip("_") in NAMES or re.match(r"_?of_.", name)) and (file, name) not in ALLOWED
    ]
    assert vague == []
