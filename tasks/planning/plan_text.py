"""A plan as text: a line or two for the terminal, a page for the Prefect UI."""

from config.records import CONTINUE, STAGES
from costs.ledger.budget import Cost, all_limits, total
from reporting.numbers import duration, usd
from tasks.dvc.origins import Origin
from tasks.planning.prepared import Planned, Unplannable
from tasks.run.changed_code import policy


def summary(prepared: Planned | Unplannable) -> list[str]:
    """The plan in a line or two."""
    if isinstance(prepared, Unplannable):
        return [f"No plan: {prepared.fault}"]
    stages_by_run: dict[str, list[str]] = {}
    for name, origin in prepared.origins.items():
        stages_by_run.setdefault(origin.run_id, []).append(name)
    reused = [
        f"Reused at no cost: {', '.join(stages)}, made by run {run_id}."
        for run_id, stages in stages_by_run.items()
        if run_id
    ]
    if not prepared.ahead:
        return ["Planned: nothing to do, every stage is unchanged.", *reused]
    cost = prepared.ahead_total
    command = "rlhf plan" if prepared.ahead.keys() <= set(STAGES) else "rlhf plan --retrain"
    stages = ", ".join(f"{name} {duration(part.seconds)}" for name, part in prepared.ahead.items())
    lines = [f"Planned: {usd(cost.usd)} and {duration(cost.seconds)} ({stages}). Details: {command}", *reused]
    before = total(prepared.spent)
    if prepared.continues and before.seconds:
        lines.append(
            f"Goes on from run {prepared.continues}, which spent {usd(before.usd)} and {duration(before.seconds)}."
        )
    lines += prepared.left_aside
    done = "Going on from it." if policy() == CONTINUE else "Starting over."
    lines += [f"warning: {change} {done}" for change in prepared.changed]
    for stage in prepared.plan.stages:
        if not stage.fits and stage.stage in prepared.ahead:
            lack = stage.shortfall_bytes / 2**30
            lines.append(
                f"warning: {stage.stage} is planned to lack {lack:.2f} GiB of memory on "
                f"{stage.hardware}. {stage.lever}"
            )
    return lines


def markdown(prepared: Planned | Unplannable) -> str:
    """The plan for the Prefect UI, as the basis of an approval."""
    if isinstance(prepared, Unplannable):
        return f"# No plan\n\n{prepared.fault}\n"
    budget, cost, before = prepared.params.budget, prepared.ahead_total, total(prepared.spent)
    rows = [
        (
            stage.stage,
            *_cells(prepared.ahead.get(stage.stage), prepared.origins.get(stage.stage)),
            f"{stage.peak_bytes_per_gpu / 2**30:.2f} GiB" if stage.peak_bytes_per_gpu else "",
        )
        for stage in prepared.plan.stages
    ]
    rows.append(("**total**", duration(cost.seconds), usd(cost.usd), ""))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    bounds = [f"- `{limit.key}`: {limit.value:g} {limit.unit}" for limit in all_limits(budget)]
    if budget.approval_usd is not None:
        bounds.append(f"- `budget.approval_usd`: {budget.approval_usd:g} USD")
    spent_line = f"Spent by the runs it goes on from: {usd(before.usd)}.\n\n" if before.seconds else ""
    spent_line += "".join(f"{line}\n\n" for line in prepared.left_aside)
    spent_line += "".join(f"{change} Decided: {policy()}.\n\n" for change in prepared.changed)
    assumed = "\n".join(f"- {line}" for line in prepared.plan.assumptions)
    return (
        f"# Planned: {usd(cost.usd)}, {duration(cost.seconds)}\n\n{spent_line}"
        f"| stage | time | cost | peak memory |\n|---|---:|---:|---:|\n{table}\n\n"
        + ("Limits:\n\n" + "\n".join(bounds) + "\n\n" if bounds else "No limit is set.\n\n")
        + f"Assumed:\n\n{assumed}\n"
    )


def _cells(cost: Cost | None, origin: Origin | None) -> tuple[str, str]:
    if cost:
        return duration(cost.seconds), usd(cost.usd)
    return f"unchanged, made by run {origin.run_id}" if origin and origin.run_id else "unchanged", "0"
