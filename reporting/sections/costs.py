"""Time and cost: per stage, per phase of PPO, and every phase in a table."""

from markupsafe import Markup

from config.methods.registry import OFFLINE_METHODS
from costs.ledger.ledger import Ledger, StageCost
from costs.ledger.reconcile import Comparison
from reporting.charts import Part, bar_list, strip
from reporting.inputs import Findings
from reporting.key_figures import key_figure
from reporting.numbers import ABSENT, count, deviation, duration, memory, short, usd
from reporting.parts import badge, card, details, grid, missing, paragraph, remark, section, swatch, table
from reporting.templating import join
from reporting.verdict import usd_per_win_rate_point

STATE_TONES = {
    "done": "good",
    "cached": "quiet",
    "stopped": "open",
    "unfinished": "open",
    "running": "open",
    "failed": "bad",
}
PHASES = {
    "rollouts": "start: imports and loading. rollout: generating replies. logprobs, score, "
    "reference, value: reading them. other: between phases.",
    "offline": "start: imports and loading. reference: the SFT model reads every pair or rated reply once. train: "
    "steps. evaluate: held-out rows.",
}
TONES = ("c1", "c2", "c3", "c4", "c5")


def costs_section(findings: Findings) -> Markup:
    """Table of the stages, shares of the time, phases."""
    ledger = findings.ledger
    title = "Time and cost"
    if not ledger.stages:
        return section(
            "cost",
            title,
            None,
            missing("What this model cost to make was not recorded here: only its outputs were fetched."),
        )
    aligned = ledger.stage(findings.params.align.method)
    lead = "Measured wall time of every process, failed attempts included, times the devices it held and their price."
    planned = _planned(findings)
    return section(
        "cost",
        title,
        lead,
        _shares(ledger),
        _stage_table(findings),
        planned,
        _phases_card(aligned),
        _all_phases(ledger),
    )


def _shares(ledger: Ledger) -> Markup | None:
    if not ledger.total_seconds:
        return None
    parts = [
        Part(stage.stage, stage.seconds, f"{duration(stage.seconds)}, {usd(stage.usd)}", _tone(i))
        for i, stage in enumerate(ledger.stages)
    ]
    description = ", ".join(f"{part.name} {part.shown}" for part in parts if part.size)
    return card("Share of each stage", strip(parts, f"Share of each stage in the time: {description}"))


def _stage_table(findings: Findings) -> Markup:
    ledger = findings.ledger
    header = ["Stage", "Time", "Cost", "Peak memory", "Result", "Key figure"]
    rows = []
    for i, stage in enumerate(ledger.stages):
        name = swatch(_tone(i), stage.stage)
        state = join(badge(stage.state, STATE_TONES.get(stage.state, "open")), _remark(stage))
        figure = key_figure(stage.stage, findings.metrics.get(stage.stage, {})) or ABSENT
        rows.append([name, duration(stage.seconds), usd(stage.usd), memory(stage.peak_bytes), state, figure])
    if ledger.outside_seconds >= 1:
        note = "" if ledger.outside_usd else "not counted: prices.outside_stages"
        cost = usd(ledger.outside_usd) if ledger.outside_usd else ABSENT
        rows.append(["outside stages", duration(ledger.outside_seconds), cost, "", note, ""])
    foot = ["Total", duration(ledger.total_seconds), usd(ledger.total_usd), "", "", ""]
    return table(header, rows, foot, numbers=range(1, 4))


def _remark(stage: StageCost) -> Markup | None:
    """Details that the state alone does not give."""
    remarks = []
    if stage.made_by:
        remarks.append(f"made by run {stage.made_by}")
    if stage.cached and stage.saved_usd:
        remarks.append(f"saved {usd(stage.saved_usd)} and {duration(stage.saved_seconds)}")
    if stage.attempts > 1:
        remarks.append(f"{stage.attempts} attempts")
    if stage.waste_seconds:
        remarks.append(f"{duration(stage.waste_seconds)} done twice ({usd(stage.waste_usd)})")
    if stage.taught_nothing_usd:
        remarks.append(f"{usd(stage.taught_nothing_usd)} for replies that taught nothing")
    if stage.message and stage.state != "done":
        remarks.append(stage.message)
    return remark(", ".join(remarks)) if remarks else None


def _planned(findings: Findings) -> Markup | None:
    """The plan beside the measurement: a chart of the stages, and a table of every phase."""
    reconciled = findings.reconciled
    compared = [stage for stage in reconciled.stages if stage.total.error is not None]
    if not compared:
        return None
    bars = []
    for stage in compared:
        comparison = stage.total
        bars.append(
            Part(
                f"{stage.stage} planned", comparison.planned_seconds or 0.0, duration(comparison.planned_seconds), "c2"
            )
        )
        shown = f"{duration(comparison.measured_seconds)} · {deviation(comparison.error)}"
        bars.append(Part(f"{stage.stage} measured", comparison.measured_seconds or 0.0, shown, "c4"))
    note = (
        f"Planned for {reconciled.hardware} before the run. Measured: the work that made the outputs, done once. "
        f"The plan of these stages together was off by {deviation(reconciled.total.error)}."
    )
    picture = card("Planned and measured", bar_list(bars, "Planned and measured time of each stage"), note=note)
    return join(picture, details("Plan and measurement of every phase", _planned_table(findings)), _bought(findings))


def _planned_table(findings: Findings) -> Markup:
    header = [
        "Stage",
        "Phase",
        "Planned",
        "Measured",
        "Error",
        "Planned cost",
        "Measured cost",
        "Planned peak",
        "Measured peak",
        "Error of peak",
    ]
    rows = [
        [stage.stage, name, *_comparison(planned)]
        for stage in findings.reconciled.stages
        for name, planned in [*stage.phases.items(), ("all", stage.total)]
    ]
    return table(header, rows, ["Total", "", *_comparison(findings.reconciled.total)], numbers=range(2, 10))


def _comparison(planned: Comparison) -> list[str]:
    return [
        duration(planned.planned_seconds),
        duration(planned.measured_seconds),
        deviation(planned.error),
        usd(planned.planned_usd),
        usd(planned.measured_usd),
        memory(planned.planned_peak_bytes),
        memory(planned.measured_peak_bytes),
        deviation(planned.error_peak_bytes),
    ]


def _bought(findings: Findings) -> Markup | None:
    point = usd_per_win_rate_point(findings)
    if point is None:
        return None
    return paragraph(f"A point of win rate above 50% cost {usd(point)}.", "note")


def _phases_card(stage: StageCost | None) -> Markup | None:
    """The phases of the alignment stage, where rollout and update dominate."""
    if stage is None or not stage.phases:
        return None
    parts = [
        Part(phase.phase, phase.seconds, f"{duration(phase.seconds)} · {usd(phase.usd)}", "c4")
        for phase in stage.phases
    ]
    note = PHASES["offline" if stage.stage in OFFLINE_METHODS else "rollouts"]
    times = card(
        f"Phases of {stage.stage}", bar_list(parts, f"Time and cost of each phase of {stage.stage}"), note=note
    )
    rates = {phase.phase: phase.tokens / phase.seconds for phase in stage.phases if phase.tokens and phase.seconds}
    if not rates:
        return times
    speeds = [Part(name, rate, f"{short(rate)}/s", "c2") for name, rate in rates.items()]
    label = f"Tokens per second in each phase of {stage.stage}"
    makes = " Rollout makes them one by one, the other phases read them at once." if "rollout" in rates else ""
    speed_note = f"Real tokens, padding not counted.{makes}"
    return grid(times, card("Tokens per second", bar_list(speeds, label), note=speed_note), kind="halves")


def _all_phases(ledger: Ledger) -> Markup:
    rows = [
        [
            stage.stage,
            phase.phase,
            duration(phase.seconds),
            usd(phase.usd),
            count(phase.tokens) if phase.tokens else ABSENT,
            short(phase.tokens / phase.seconds) if phase.tokens and phase.seconds else ABSENT,
            memory(phase.peak_bytes),
        ]
        for stage in ledger.stages
        for phase in stage.phases
    ]
    header = ["Stage", "Phase", "Time", "Cost", "Tokens", "Tokens/s", "Peak memory"]
    return details("Every phase of every stage", table(header, rows, numbers=range(2, 7)))


def _tone(i: int) -> str:
    return TONES[i % len(TONES)]
