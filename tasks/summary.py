"""The result of a run as the markdown that the Prefect UI shows."""

import base64
from pathlib import Path

from reporting.inputs import read_findings
from reporting.key_picture import key_picture
from reporting.summary import summary
from tasks.run import Run


def markdown(run: Run, report: Path) -> str:
    """The run's summary with its picture inside, and where the report is."""
    findings = read_findings(run.root, run.params, run.run_id)
    picture = base64.b64encode(key_picture(findings).encode()).decode()
    path = report.resolve()
    return f"{summary(findings, f'data:image/svg+xml;base64,{picture}')}\n[Report]({path.as_uri()}): `{path}`\n"
