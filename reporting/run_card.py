"""The run card: a run in ten lines of Markdown, for a paper, a model card or an issue."""

from collections.abc import Iterator
from pathlib import Path

from config.records import kept_folder
from config.workspace.kept import completed_stages
from config.workspace.rows import pipeline_rows
from reporting.inputs import Findings
from reporting.numbers import decimal, percent, usd
from reporting.sections.overview import machine_name, model_name, source_name
from reporting.verdict import aligned_wins, verdict

DIGITS = 12
"""Of a digest and a commit."""


def run_card(root: Path, findings: Findings) -> str:
    """The card of a run, a table of two columns under its name and verdict."""
    rows = "\n".join(f"| {name} | {words} |" for name, words in card_rows(root, findings))
    return f"**{findings.ledger.run_id}**: {verdict(findings).title.lower()}\n\n| | |\n|---|---|\n{rows}\n"


def card_rows(root: Path, findings: Findings) -> Iterator[tuple[str, str]]:
    """(name, words) of each line; what is not known is left out."""
    ledger, params = findings.ledger, findings.params
    stages = [stage for stage in ledger.stages if stage.usd or stage.saved_usd]
    data = completed_stages(root, ledger.run_id).get("data", {})
    start = next((row for row in pipeline_rows(root) if (row.run_id, row.event) == (ledger.run_id, "start")), None)
    commit = str(start.detail.get("git.commit", ""))[:DIGITS] if start else ""
    yield "model", model_name(params, findings.value("sft", "parameters"))
    yield "data", ", ".join([source_name(params), *(f"`{digest[:DIGITS]}`" for digest in [*data.values()][:1])])
    yield "method", f"{params.align.method}, seed {params.seed}"
    yield "hardware", f"{machine_name(findings)}, {decimal(ledger.device_seconds / 3600)} device-hours"
    yield "cost", f"{usd(ledger.made_usd)}: {', '.join(f'{s.stage} {usd(s.usd + s.saved_usd)}' for s in stages)}"
    yield (
        "waste",
        f"{usd(ledger.waste_usd)} done again, {usd(ledger.taught_nothing_usd)} for replies that taught nothing",
    )
    wins = aligned_wins(findings)
    if wins.rate is not None:
        span = f" ({percent(wins.low)} to {percent(wins.high)})" if wins.low is not None else ""
        yield "gain", f"wins {percent(wins.rate)}{span} of comparisons with SFT by {wins.judge}"
    if commit:
        yield "code", f"`{commit}`{' with changes' if start and start.detail.get('git.dirty') == 'True' else ''}"
    yield "repeat", f"`rlhf run --recipe {kept_folder(Path(), ledger.run_id) / 'params.yaml'}`"
