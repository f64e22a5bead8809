"""`make mutate` runs its tests in a copy of the tree: what they import has to be copied too."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").is_file()
}


def modules(path: Path) -> Iterator[Path]:
    """The Python files of a folder, or the file, with each conftest.py that pytest reads for it."""
    yield from path.rglob("*.py") if path.is_dir() else [path]
    for folder in path.parents:
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"
        if folder == ROOT:
            return


def imported(path: Path) -> set[str]:
    """The first names of everything that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.split(".")[0])
    return names


def test_the_copy_of_the_tree_has_every_package_that_its_tests_import() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutmut"]
    copied = {*settings["source_paths"], *settings["also_copy"], "tests"}
    tests = [ROOT / name for name in settings["pytest_add_cli_args_test_selection"]]
    needed = {name for test in tests for path in modules(test) for name in imported(path)}
    assert needed & PACKAGES - copied == set()
