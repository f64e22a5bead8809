"""Builds report/report.html, and a run's summary."""

from pathlib import Path

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from config.records import PICTURE, SUMMARY, kept_folder
from config.schema import Params
from reporting.inputs import read_findings
from reporting.key_picture import key_picture
from reporting.page import page
from reporting.summary import summary

REPORT = Path("report") / "report.html"


def build_report(root: Path, params: Params, run_id: str | None = None) -> Path:
    """Write report/report.html below `root` for the run `run_id`, by default the newest, and return its path.

    The file is written atomically, and is a function of what the run left: building it twice gives the same bytes.
    Raises CostError if there is no such run, EnvironmentFault if it cannot be written; the previous report is kept.
    """
    target = root / REPORT
    write_page(target, page(read_findings(root, params, run_id)), "rlhf report --html")
    return target


def build_summary(root: Path, params: Params, run_id: str) -> None:
    """Write summary.md and key.svg into the folder of the run's own copies.

    Raises CostError if there is no such run, EnvironmentFault if they cannot be written.
    """
    findings = read_findings(root, params, run_id)
    for name, content in ((PICTURE, key_picture(findings)), (SUMMARY, summary(findings))):
        write_page(kept_folder(root, run_id) / name, content, "rlhf report --html")


def write_page(target: Path, content: str, command: str) -> None:
    """Write a page atomically. Raises EnvironmentFault, naming `command` as what to run again, if it cannot be
    written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    except OSError as error:
        raise EnvironmentFault(
            f"{target} cannot be written: {error.strerror or error}. Free some space or make the "
            f"folder writable, then run: {command}"
        ) from error
