"""Phrases that a native speaker would not write stay out of the repository."""

import re
import subprocess

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
    found = [
        f"{name}:{number}: write {BANNED[pattern]!r}"
        for name in FILES
        if (ROOT / name).exists()
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []
