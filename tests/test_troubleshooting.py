"""docs/troubleshooting.md quotes messages that the code really says."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("cli", "config", "costs", "labelling", "reporting", "serving", "tasks", "tracking", "training")


def quoted() -> list[str]:
    """The first cell of each row."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)


def said(node: ast.AST) -> str | None:
    """A text of the code as the page quotes it; what is put in when it runs is `…`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) or "…" for part in node.values)
    return None


def texts() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (text := said(node)) is not None:
                    yield text


@pytest.fixture(scope="module")
def code() -> str:
    return "\n".join(texts())


def test_the_page_has_the_families_of_messages() -> None:
    assert len(quoted()) > 40
    assert len(set(quoted())) == len(quoted())


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_that_the_code_says(message: str, code: str) -> None:
    assert message in code
