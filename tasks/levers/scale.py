"""Measures how the cost of each stage grows with one factor at a time, beside what the planner says
of the same points.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from config.errors import EnvironmentFault, ParamsError
from config.schema import Params
from config.workspace.levers import SCALE, Growth, GrowthPoint, Scale, keep
from costs.levers.growth import (
    Exponent,
    Factor,
    Steps,
    at,
    exponent,
    factors,
    fitted,
    quadratic,
    timed,
    typical_seconds,
)
from costs.planning.models import base_shape
from costs.planning.phases import phases
from costs.planning.rows import count
from costs.planning.settings import setting_of
from costs.planning.target import target
from costs.tables.price import stage_price
from reporting.numbers import duration, usd
from tasks.levers.processes import run_stage, usage
from tasks.levers.stage_folders import alone, prepare, stage_folder, write_lock
from tasks.run.stop import StopRequest
from tasks.stage.progress import Display

UNTIMED = ("start", "save", "end", "other", "evaluate")
"""Phases of a stage that do not grow with its steps, or are not planned by the step."""
CONFIDENCE = 0.95


class Measuring:
    """A running measurement."""

    def __init__(
        self, root: Path, params: Params, quick: bool, only: list[str], stop: StopRequest
    ) -> None:
        self.root, self.params, self.quick, self.stop = root, timed(params), quick, stop
        self.method = params.align.method
        self.display = Display()
        self.aim = target(params, None, None, None, root)
        self.factors = [each for each in factors(self.params) if not only or each.name in only]
        known = [each.name for each in factors(self.params)]
        for name in only:
            if name not in known:
                raise ParamsError(f"--only {name} is not a factor. Known: {', '.join(known)}.")
        self.usd = 0.0

    def run(self) -> Scale:
        """Every factor. Raises StageStopped where it was asked to stop, EnvironmentFault if a stage
        fails or a comparison is running in this project.
        """
        with alone(self.root):
            return self._run()

    def _run(self) -> Scale:
        growths = []
        for factor in self.factors:
            growths.append(self._growth(factor))
            one = growths[-1]
            self.display.say(
                f"{factor.name:<10} time ~ {factor.name}^{one.exponent:.2f} "
                f"({one.exponent_low:.2f} to {one.exponent_high:.2f}), planned "
                f"{one.planned_exponent:.2f}; {usd(self.usd)} so far"
            )
        by_name = {each.factor: each.exponent for each in growths}
        answer = (
            quadratic(by_name["model"], by_name["data"])
            if {"model", "data"} <= by_name.keys()
            else ""
        )
        found = Scale(
            hardware=self.aim.hardware.name, factors=growths, answer=answer, total_usd=self.usd
        )
        keep(self.root, found, SCALE)
        return found

    def _growth(self, factor: Factor) -> Growth:
        stages = [self.method if each == "align" else each for each in factor.stages]
        sizes, points = [], []
        measured: dict[str, list[Steps]] = {stage: [] for stage in stages}
        planned: dict[str, list[Steps]] = {stage: [] for stage in stages}
        for multiple in factor.quick if self.quick else factor.sizes:
            params = at(self.params, factor, multiple)
            self._make(params, stages)
            size = self._size(factor, params, multiple)
            for stage in stages:
                measured[stage].append(self._measured(params, stage))
                planned[stage].append(self._planned(params, stage))
            sizes.append(size)
            points.append(
                self._point(size, params, {s: (measured[s][-1], planned[s][-1]) for s in stages})
            )
        together = [_together(measured, i) for i in range(len(sizes))]
        slope: Exponent = fitted(sizes, together, CONFIDENCE, self.params.seed)
        return Growth(
            factor=factor.name,
            unit=factor.unit,
            points=points,
            exponent=slope.value,
            exponent_low=slope.low,
            exponent_high=slope.high,
            planned_exponent=exponent(sizes, [point.planned_seconds for point in points]),
            by_stage={
                stage: (
                    exponent(sizes, [typical_seconds(each) for each in measured[stage]]),
                    exponent(sizes, [typical_seconds(each) for each in planned[stage]]),
                )
                for stage in stages
            },
        )

    def _make(self, params: Params, stages: Sequence[str]) -> None:
        """Run the stages of a point, and those before them, as far as they have not been run."""
        chain = self._chain(params)
        for stage in chain:
            if stage == self.method and stage not in stages:
                continue
            folder = prepare(self.root, chain, stage)
            state = run_stage(folder, params, stage, self.stop, self.display.show)
            if state.state != "done":
                raise EnvironmentFault(f"{stage} {state.state}: {state.reason} See {folder}.")
            if stage == "data":
                write_lock(folder, params)
            rows = usage(folder, stage)
            self.usd += stage_price(params, stage).usd_of_rows(rows)

    def _chain(self, params: Params) -> dict[str, Params]:
        return dict.fromkeys(("data", "sft", "reward", self.method), params)

    def _size(self, factor: Factor, params: Params, multiple: float) -> float:
        folder = stage_folder(self.root, self._chain(params), "data")
        if factor.name == "model":
            return base_shape(params, self.root).parameters
        if factor.name == "sequence":
            return count(params, folder).sft_tokens
        return multiple

    def _measured(self, params: Params, stage: str) -> Steps:
        """Seconds of each step by phase; the first step warms up, and counts as a usual one."""
        folder = stage_folder(self.root, self._chain(params), stage)
        rows = usage(folder, stage)
        steps: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row.phase not in UNTIMED:
                steps[row.phase].append(row.seconds)
        return {
            phase: [median(seconds[1:]), *seconds[1:]] if len(seconds) > 1 else seconds
            for phase, seconds in steps.items()
        }

    def _planned(self, params: Params, stage: str) -> Steps:
        """As many steps, as planned."""
        data = stage_folder(self.root, self._chain(params), "data")
        aim = replace(self.aim, root=data)
        setting = setting_of(params, aim, stage, count(params, data), base_shape(params, self.root))
        steps = max(1, round(setting.workload.steps))
        return {
            phase.name: [phase.seconds / steps] * steps
            for phase in phases(setting)
            if phase.bound != "fixed" and phase.name not in UNTIMED
        }

    def _point(
        self, size: float, params: Params, found: dict[str, tuple[Steps, Steps]]
    ) -> GrowthPoint:
        stages: dict[str, dict[str, float]] = {}
        totals = {"measured": 0.0, "planned": 0.0}
        dollars = {"measured": 0.0, "planned": 0.0}
        for stage, both in found.items():
            stages[stage] = {}
            for kind, steps in zip(totals, both, strict=True):
                seconds = typical_seconds(steps)
                totals[kind] += seconds
                dollars[kind] += stage_price(params, stage).usd(seconds)
                stages[stage][kind] = seconds
                for phase, each in steps.items():
                    stages[stage][f"{kind}/{phase}"] = typical_seconds({phase: each})
        self.display.say(
            f"  {size:,.4g}: {duration(totals['measured'])}, planned {duration(totals['planned'])}"
        )
        return GrowthPoint(
            size=size,
            measured_seconds=totals["measured"],
            planned_seconds=totals["planned"],
            measured_usd=dollars["measured"],
            planned_usd=dollars["planned"],
            stages=stages,
        )


def _together(measured: dict[str, list[Steps]], point: int) -> Steps:
    """The phases of all stages at one point."""
    return {
        f"{stage}/{phase}": seconds
        for stage, points in measured.items()
        for phase, seconds in points[point].items()
    }
