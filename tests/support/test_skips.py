import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.skips import is_allowed

SKIPS = """
import pytest

def test_one():
    pytest.skip("{reason}")

@pytest.mark.skipif(True, reason="{reason}")
def test_two(): ...

@pytest.mark.xfail(raises=ZeroDivisionError)
def test_that_fails_as_is_known():
    1 / 0
"""


def outcome(folder: Path, content: str) -> str:
    """How many tests of a file ended how, with the plugin loaded."""
    (folder / "test_it.py").write_text(content)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.skips",
            "-p",
            "no:cacheprovider",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1].partition(" in ")[0]


def test_a_skip_fails_unless_its_reason_is_allowed(tmp_path: Path) -> None:
    assert outcome(tmp_path, SKIPS.format(reason="not today")) == "1 failed, 1 xfailed, 1 error"
    allowed = "no browser: none of chromium is on the PATH"
    assert outcome(tmp_path, SKIPS.format(reason=allowed)) == "2 skipped, 1 xfailed"
    whole = "import pytest\npytest.importorskip('nothing_of_that_name')\n"
    assert outcome(tmp_path, whole) == "1 error"


@pytest.mark.parametrize("reason", ["", "no GPU", "a table is not here"])
def test_what_is_not_on_the_list_is_not_allowed(reason: str) -> None:
    assert not is_allowed(reason)
