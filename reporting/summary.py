"""A run in a few lines of markdown with its key picture, for the pages of the tracker and the orchestrator."""

from config.records import PICTURE
from reporting.inputs import Findings
from reporting.key_figures import key_figure
from reporting.numbers import deviation, duration, usd
from reporting.sections.serving import served_summary
from reporting.verdict import usd_per_win_rate_point, verdict


def summary(findings: Findings, picture: str = PICTURE) -> str:
    """Verdict, key picture and a table of stage, time, cost, error of the plan and key figure. `picture` is the
    picture's path from the page that shows it.
    """
    judged, ledger = verdict(findings), findings.ledger
    errors = {stage.stage: deviation(stage.total.error) for stage in findings.reconciled.stages}
    rows = [
        (
            _named(stage.stage, stage.state),
            duration(stage.seconds),
            usd(stage.usd),
            errors.get(stage.stage, deviation(None)),
            key_figure(stage.stage, findings.metrics.get(stage.stage, {})),
        )
        for stage in ledger.stages
    ]
    if (served := served_summary(findings)) is not None:
        rows.append(("served", "", served[0], "", served[1]))
    total = deviation(findings.reconciled.total.error)
    rows.append(
        (_named("total", ledger.state), duration(ledger.total_seconds), usd(ledger.total_usd), total, _point(findings))
    )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"**{judged.title}.** {judged.sentence}\n\n![key picture]({picture})\n\n"
        f"| stage | time | cost | plan off by | key figure |\n|---|---:|---:|---:|---|\n{table}\n"
    )


def _point(findings: Findings) -> str:
    point = usd_per_win_rate_point(findings)
    return f"{usd(point)} per point of win rate" if point is not None else ""


def _named(name: str, state: str) -> str:
    """Append the state unless it is the usual one."""
    return name if state in ("done", "completed") else f"{name} ({state.replace('_', ' ')})"
