"""The difference between two plans, as a cost-diff tool shows it on a pull request."""

from dataclasses import dataclass

from costs.planning.plans import Plan, StagePlan


@dataclass(frozen=True)
class Difference:
    """One stage (or the total) in both plans; None where a plan lacks it."""

    stage: str
    seconds: tuple[float | None, float | None]
    usd: tuple[float | None, float | None]
    peak_bytes: tuple[float | None, float | None]
    fits: tuple[bool | None, bool | None]

    @property
    def changed(self) -> bool:
        return any(a != b for a, b in (self.seconds, self.usd, self.peak_bytes, self.fits))


def compare(before: Plan, after: Plan) -> list[Difference]:
    """Every stage of either plan, then the total."""
    first, second = ({stage.stage: stage for stage in before.stages}, {stage.stage: stage for stage in after.stages})
    names = [*first, *(name for name in second if name not in first)]
    rows = [_difference(name, first.get(name), second.get(name)) for name in names]
    a, b = before.total, after.total
    total = Difference(
        "total",
        (a["seconds"], b["seconds"]),
        (a["usd"]["expected"], b["usd"]["expected"]),
        (a["peak_bytes_per_gpu"], b["peak_bytes_per_gpu"]),
        (a["fits"], b["fits"]),
    )
    return [*rows, total]


def _difference(name: str, before: StagePlan | None, after: StagePlan | None) -> Difference:
    return Difference(
        name,
        (before.seconds if before else None, after.seconds if after else None),
        (before.usd.expected if before else None, after.usd.expected if after else None),
        (before.peak_bytes_per_gpu if before else None, after.peak_bytes_per_gpu if after else None),
        (before.fits if before else None, after.fits if after else None),
    )


def markdown(rows: list[Difference], before: str, after: str) -> str:
    """A table for a pull request: what changes, and by how much."""
    lines = [
        f"### Planned cost: `{before}` to `{after}`",
        "",
        "| stage | cost before | cost after | change | time | memory | fits |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        marked = f"**{row.stage}**" if row.stage == "total" else row.stage
        usd = change(row.usd)
        lines.append(
            f"| {marked} | {money(row.usd[0])} | {money(row.usd[1])} | {usd} "
            f"| {change(row.seconds)} | {change(row.peak_bytes)} | {verdict(row.fits)} |"
        )
    return "\n".join(lines) + "\n"


def money(value: float | None) -> str:
    """US dollars with as many digits as a small run needs."""
    if value is None:
        return "-"
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def change(pair: tuple[float | None, float | None]) -> str:
    """Relative change, `new` or `gone` where one side lacks it."""
    before, after = pair
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else "new"


def verdict(pair: tuple[bool | None, bool | None]) -> str:
    words = {True: "yes", False: "no", None: "-"}
    return words[pair[1]] if pair[0] == pair[1] else f"{words[pair[0]]} -> {words[pair[1]]}"
