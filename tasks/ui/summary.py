"""The result of a run as the Prefect UI shows it."""

import base64
from collections.abc import Mapping
from pathlib import Path

from costs.ledger.ledger import Ledger
from reporting.inputs import read_findings
from reporting.key_picture import key_picture
from reporting.summary import summary
from reporting.verdict import verdict
from tasks.run.run import Run
from tasks.ui.links import NAMES


def markdown(run: Run, report: Path | None, links: Mapping[str, str]) -> str:
    """The run's summary with its picture inside, and where to look: `links` has a URL by the name of a page."""
    findings = read_findings(run.root, run.params, run.run_id)
    picture = base64.b64encode(key_picture(findings).encode()).decode()
    where = [f"[{NAMES[name]}]({url})" for name, url in links.items()]
    where += [f"report on this machine: `{report.resolve()}`"] if report else []
    return f"{summary(findings, f'data:image/svg+xml;base64,{picture}')}\n{', '.join(where)}\n"


def verdict_and_ledger(run: Run) -> tuple[str, Ledger]:
    """The verdict in a sentence, and the ledger."""
    findings = read_findings(run.root, run.params, run.run_id)
    judged = verdict(findings)
    return f"{judged.title}. {judged.sentence}", findings.ledger
