"""docs/papers.md against the code: sources, functions and tests."""

import importlib
import re

from tests.conftest import ROOT

PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ARXIV_ID = r"arXiv[: ](\d{4}\.\d{4,5})"
PACKAGES = ("benchmarks", "config", "costs", "labelling", "reporting", "tracking", "tasks", "flows", "cli", "training")


def sources_in_code() -> dict[str, str]:
    """arXiv id -> a file that gives it as a source."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    text_of = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    return {result: path for path, text in text_of.items() for result in re.findall(ARXIV_ID, text)}


def test_every_arxiv_id_in_the_code_has_a_row() -> None:
    result = sources_in_code()
    assert len(result) >= 20
    assert {paper: path for paper, path in result.items() if paper not in re.findall(ARXIV_ID, PAPERS)} == {}


def test_every_arxiv_id_of_the_page_is_in_the_code() -> None:
    assert sorted(set(re.findall(ARXIV_ID, PAPERS)) - set(sources_in_code())) == []


def test_every_function_the_page_names_exists() -> None:
    names = re.findall(r"`((?:" + "|".join(PACKAGES) + r")\.[a-z_.]+)`", PAPERS)
    assert len(names) > 15
    for name in names:
        module, function = name.rsplit(".", 1)
        assert callable(getattr(importlib.import_module(module), function)), name


def test_every_test_file_the_page_names_exists() -> None:
    files = re.findall(r"`(tests/\S+\.py)`", PAPERS)
    assert len(files) > 5
    assert [path for path in files if not (ROOT / path).exists()] == []
