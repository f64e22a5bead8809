"""Which tests may be skipped where CI is set: each for want of a thing that CI may lack, protected by other tests too.
Any other skip fails there, so that none is lost unnoticed.
"""

import re
from typing import Any

import pytest

ALLOWED = {
    r"no browser: none of": "a system package that .ci/run brings where it can",
    r"no PostgreSQL here: ": "a system package; SQLite is tested everywhere, and the containers' tests use PostgreSQL",
    r"only root can become another user": "CI need not run as root",
    r"this user may not mount a file system": "a container may not",
    r"this system cannot reset the peak of a process": "some sandboxes have no clear_refs",
}
"""Pattern of a skip's reason -> why it may be."""


def is_allowed(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in ALLOWED)


def refuse(report: Any) -> None:
    """Make a failure of a report of a skip (of a test or of a whole file) that is not allowed."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    longrepr = report.longrepr
    reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}: with CI set a skip fails unless tests/support/skips.py allows it. "
            "Bring what is missing, or add the reason there."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    refuse(report)
    return report
