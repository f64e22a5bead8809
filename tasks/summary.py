"""The result of a run as the markdown that the Prefect UI shows."""

from pathlib import Path

from reporting.inputs import read_findings
from reporting.key_figures import key_figure
from reporting.numbers import duration, usd
from reporting.verdict import verdict
from tasks.run import Run


def markdown(run: Run, report: Path) -> str:
    """Verdict, stage / time / cost / key figure, and where the report is."""
    findings = read_findings(run.root, run.params, run.run_id)
    judged, book = verdict(findings), findings.ledger
    rows = [
        (stage.stage, stage.state, duration(stage.seconds), usd(stage.usd), key_figure(stage.stage, findings.metrics.get(stage.stage, {})))
        for stage in book.stages
    ]
    rows.append(("total", book.state, duration(book.total_seconds), usd(book.total_usd), ""))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    path = report.resolve()
    return (
        f"# {judged.title}\n\n{judged.sentence}\n\n"
        f"| stage | result | time | cost | key figure |\n|---|---|---:|---:|---|\n{table}\n\n"
        f"[Report]({path.as_uri()}): `{path}`\n"
    )
