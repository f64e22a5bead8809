"""The runs of a workspace in a list: state, gain, cost, and changed parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config.differences import differences, in_a_line
from config.errors import RlhfError
from config.schema import Params
from config.workspace.kept import kept_params
from config.workspace.rows import pipeline_rows
from reporting.inputs import Findings, read_findings
from reporting.runs_named import known_runs
from reporting.verdict import aligned_wins


class PastRun(NamedTuple):
    run_id: str
    state: str = ""
    """The same as Ledger.state."""
    started: float | None = None
    """Seconds since the epoch."""
    method: str | None = None
    seconds: float | None = None
    usd: float | None = None
    win_rate: float | None = None
    """Win rate of the aligned model over the SFT model, by gold score if there is one, else by the reward model."""
    win_rate_low: float | None = None
    win_rate_high: float | None = None
    gold_aligned: float | None = None
    kl: float | None = None
    changed: str = ""
    """Parameters that differ from the previous run in the list; empty for the oldest."""
    note: str = ""
    """Missing parts of the run, or the reason for its early end; empty if there are none."""
    made_usd: float | None = None
    """Cost of making its outputs, reused stages included."""


def past_runs(root: Path, most: int | None = None) -> list[PastRun]:
    """The newest `most` runs, newest first."""
    run_ids = known_runs(root)
    shown = run_ids[:most]
    params = {run_id: _params(root, run_id) for run_id in run_ids[: len(shown) + 1]}
    before: Sequence[str | None] = [*run_ids[1:], None]
    return [
        _past_run(root, run_id, params[run_id], params.get(earlier) if earlier else None)
        for run_id, earlier in zip(shown, before, strict=False)
    ]


def _params(root: Path, run_id: str) -> Params | str:
    """Its params, or why there are none."""
    try:
        return kept_params(root, run_id)
    except RlhfError as error:
        return str(error)


def _past_run(root: Path, run_id: str, params: Params | str, before: Params | str | None) -> PastRun:
    if isinstance(params, str):
        return PastRun(run_id, note=params)
    findings = read_findings(root, params, run_id)
    ledger = findings.ledger
    return PastRun(
        run_id,
        ledger.state,
        ledger.started,
        params.align.method,
        ledger.total_seconds,
        ledger.total_usd,
        *aligned_wins(findings)[1:],
        findings.value("evaluate", "gold_aligned"),
        findings.value("evaluate", "kl"),
        _changed(before, params) if isinstance(before, Params) else "",
        _failure(root, findings),
        made_usd=ledger.made_usd,
    )


def _failure(root: Path, findings: Findings) -> str:
    """Why a run ended early: the message of its last stage, or of the run itself."""
    ledger = findings.ledger
    if ledger.state in ("completed", "running"):
        return ""
    ended = [f"{stage.stage}: {stage.message}" for stage in ledger.stages if stage.message]
    rows = pipeline_rows(root)
    ended += [
        str(row.detail["message"])
        for row in rows
        if (row.run_id, row.event) == (ledger.run_id, "end") and "message" in row.detail
    ][-1:]
    return ended[0] if ended else ""


def _changed(before: Params, after: Params) -> str:
    changed = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return in_a_line(changed) if changed else "nothing"
