"""The comparison of levers: plan every variant, train each once per seed, score its replies, judge.

Finished work is kept: the same command continues where it was stopped, and a lever added later runs
alone.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from config.atomic_file import write_atomically
from config.compose import compose
from config.errors import CostError, EnvironmentFault, OverBudget, ParamsError
from config.load import validate, write
from config.methods.registry import SAMPLING_METHODS
from config.schema import Params
from config.workspace.levers import (
    FOLDER,
    LEVERS,
    Levers,
    keep,
)
from config.workspace.machine import bf16_instructions
from costs.levers.judgement import (
    choice,
    pareto,
    ranking,
)
from costs.levers.variants import (
    ADAPTER_RATE,
    BASELINE,
    HARDWARE_WITH_ALL,
    RATE_FACTORS,
    Device,
    Variant,
    variants,
)
from costs.planning.models import base_shape
from costs.planning.planner import plan
from costs.planning.plans import Plan, StagePlan
from costs.planning.search import cheapest
from costs.planning.target import target
from costs.tables.price import usd_per_device_hour
from reporting.numbers import decimal, duration, usd
from tasks.levers.processes import Made, Spent, run_helper, run_stage, spent
from tasks.levers.replies import scored_replies
from tasks.levers.results import Judged, Trained, costed_of, frontier, variant_result
from tasks.levers.stage_folders import (
    STUDIES,
    Chain,
    alone,
    digest,
    prepare,
    stage_folder,
    write_lock,
)
from tasks.run.stop import StopRequest
from tasks.stage.progress import Display

SWEEP_SHARE = 3
"""A learning rate is tried on a third of the updates."""
CHEAPEST = "cheapest.yaml"
ANSWER_SECONDS = 10.0
"""To answer the held-out prompts, most of it the start of a process; for the time left alone."""


class Study:
    """A running comparison."""

    def __init__(
        self,
        root: Path,
        params: Params,
        seeds: int,
        only: Sequence[str],
        stop: StopRequest,
        around: Callable[[str, Callable[[], Any]], Any] = lambda _, work: work(),
    ) -> None:
        """`around` does the work of each variant, under its name."""
        self.root, self.params, self.stop, self.around = root, params, stop, around
        self.seeds = [params.seed + i for i in range(seeds)]
        self.display = Display()
        self.aim = target(params, None, None, None, root)
        self.only = tuple(only)
        self.paid: dict[Path, float] = {}
        """Stage folder -> what it cost, each counted once."""
        self.trained: list[Trained] = []
        self.rate, self.sweep_usd = ADAPTER_RATE, 0.0
        self.layers = base_shape(params, root).layers
        self._chosen: dict[int, Params | None] = {}
        self.target: float | None = None

    # ------------------------------------------------------------ variants and plans

    def variants(self, seed: int) -> list[Variant]:
        """The requested variants. Raises ParamsError for an unknown name."""
        params = _with(self.params, {"seed": seed})
        optimised = self._optimised(seed, params)
        found = variants(params, this_device(), self.layers, optimised, self.rate)
        known = [each.name for each in found]
        for name in self.only:
            if name not in known:
                raise ParamsError(f"--only {name} is not a variant. Known: {', '.join(known)}.")
        wanted = {BASELINE, *self.only} if self.only else set(known)
        return [each for each in found if each.name in wanted]

    def _optimised(self, seed: int, params: Params) -> Params | None:
        """What `rlhf plan optimise usd` would choose for the method."""
        if seed not in self._chosen:
            try:
                found = cheapest(params, self.aim, (params.align.method,), "usd").params
            except CostError:
                found = None
            self._chosen[seed] = found
        return self._chosen[seed]

    def plan_of(self, variant: Variant, root: Path | None = None) -> Plan:
        """Its plan, on this machine or, where it cannot run here, on a device that can. `root` is
        where prepared data tell how many rows there are.
        """
        aim = self.aim
        if variant.missing:
            aim = target(variant.params, HARDWARE_WITH_ALL, None, None, self.root)
        return plan(variant.params, replace(aim, root=root or self.root), variant.stages)

    def _affordable(self) -> list[StagePlan]:
        """The plan; refuses a comparison that is planned above budget.max_usd."""
        limit, found = self.params.budget.max_usd, self.planned()
        planned = sum(stage.usd.expected for stage in found)
        if limit is not None and planned > limit:
            raise CostError(
                f"the comparison is planned at {planned:.4g} USD, budget.max_usd={limit:g} does "
                "not allow it. Raise it, or compare fewer levers with --only."
            )
        return found

    def planned(self) -> list[StagePlan]:
        """Every stage that will be run, once."""
        found: dict[str, StagePlan] = {}
        for seed in self.seeds:
            for variant in self.variants(seed):
                if variant.missing or variant.best_of:
                    continue
                chain = self.chain(variant, seed)
                for stage in self.plan_of(variant).stages:
                    found[f"{stage.stage}-{digest(self.root, chain, stage.stage)}"] = stage
        return list(found.values())

    def baseline(self, seed: int) -> Params:
        """The params as they are, without a student."""
        changes = {"seed": seed, "tracking": {"model": "aligned"}}
        return _with(self.params.model_copy(update={"distill": None}), changes)

    def chain(self, variant: Variant, seed: int) -> dict[str, Params]:
        """The params of every stage of a variant; those that it shares are the baseline's."""
        baseline = self.baseline(seed)
        return {stage: variant.params_of(stage, baseline) for stage in variant.stages}

    # ------------------------------------------------------------ the runs

    def run(self) -> Levers:
        """Everything. Raises StageStopped where it was asked to stop, EnvironmentFault if another
        comparison is running in this project or the baseline fails, CostError above the budget.
        """
        planned = self._affordable()
        with alone(self.root):
            return self._run(planned)

    def _run(self, planned: Sequence[StagePlan]) -> Levers:
        seconds = sum(stage.seconds for stage in planned)
        self.display.say(
            f"{len(planned)} stages, planned {duration(seconds)} and "
            f"{usd(sum(stage.usd.expected for stage in planned))}; what is done already is not "
            "run again."
        )
        for seed in self.seeds:
            self._run_seed(seed)
        found = self.judge()
        keep(self.root, found, LEVERS)
        self._write_cheapest(found)
        return found

    def _run_seed(self, seed: int) -> None:
        names = [each.name for each in self.variants(seed)]
        for number, name in enumerate(names, start=1):
            if seed == self.seeds[0] and name == self._first_adapter(seed):
                self._choose_rate(seed)
            variant = next(each for each in self.variants(seed) if each.name == name)
            if variant.missing:
                if seed == self.seeds[0]:
                    self.display.say(f"{name:<26} not here: {variant.missing}")
                continue
            done = self.around(name, partial(self._train, variant, seed))
            self.trained.append(done)
            if name == BASELINE and done.state.state != "done":
                raise EnvironmentFault(
                    f"the baseline {done.state.state}, and there is nothing to compare with: "
                    f"{done.state.reason}"
                )
            if name == BASELINE:
                self._write_target(done)
            self.display.say(self._line(done, number, len(names)))

    def _first_adapter(self, seed: int) -> str | None:
        """The first variant whose adapters need a learning rate of their own."""
        if self.params.section(self.params.align.method).lora is not None:
            return None
        return next((each.name for each in self.variants(seed) if _has_adapter(each)), None)

    def _train(self, variant: Variant, seed: int) -> Trained:
        chain = self.chain(variant, seed)
        done = Trained(variant, seed, chain)
        for stage in variant.stages:
            state, done.costs[stage] = self._make(chain, stage)
            done.folders[stage] = stage_folder(self.root, chain, stage)
            if state.state != "done":
                done.state = Made(state.state, f"{stage}: {state.reason}")
                break
        done.plans = {
            stage.stage: stage
            for stage in self.plan_of(variant, stage_folder(self.root, chain, "data")).stages
        }
        if done.state.state == "done":
            done.answers = self._answer(variant, chain)
        return done

    def _make(self, chain: Chain, stage: str) -> tuple[Made, Spent]:
        """Run a stage after those that it reads, unless it has ended before."""
        self._within_budget()
        folder = prepare(self.root, chain, stage)
        state = run_stage(folder, chain[stage], stage, self.stop, self.display.show)
        if stage == "data":
            write_lock(folder, chain[stage])
        cost = spent(folder, chain[stage], stage)
        self.paid[folder] = cost.usd if state.state != "done" else cost.usd + cost.waste_usd
        return state, cost

    def _within_budget(self) -> None:
        limit, total = self.params.budget.max_usd, sum(self.paid.values())
        if limit is not None and total > limit:
            raise OverBudget(
                f"the comparison has cost {usd(total)}, budget.max_usd={limit:g}: raise it and run "
                "the same command to resume there."
            )

    def _answer(self, variant: Variant, chain: Chain, sft: bool = False) -> Path:
        """The replies of a variant's model, or of the SFT model, scored by the gold score and by
        the reward model of the baseline.
        """
        judge = dict.fromkeys(("data", "sft", "reward"), self.baseline(variant.params.seed))
        self._make(judge, "reward")
        return scored_replies(self.root, variant, chain, judge, sft, self.stop)

    def _choose_rate(self, seed: int) -> None:
        """Try the adapters' learning rates on a part of the updates; the best by the reward model's
        score, never by the held-out prompts.
        """
        scores = {}
        for factor in RATE_FACTORS:
            self.rate = factor
            name = self._first_adapter(seed)
            variant = next(each for each in self.variants(seed) if each.name == name)
            method = variant.params.align.method
            if method not in SAMPLING_METHODS:
                self.rate = ADAPTER_RATE
                return
            updates = max(2, variant.params.section(method).updates // SWEEP_SHARE)
            short = replace(variant, params=_with(variant.params, {method: {"updates": updates}}))
            chain = self.chain(short, seed)
            for stage in short.stages:
                state, cost = self._make(chain, stage)
            self.sweep_usd += cost.usd
            folder = stage_folder(self.root, chain, method)
            if state.state == "done":
                metrics = json.loads((folder / f"metrics/{method}.json").read_text())
                scores[factor] = float(metrics["score"])
        self.rate = max(scores, key=scores.__getitem__) if scores else ADAPTER_RATE
        tried = ", ".join(f"{factor:g}: {decimal(score)}" for factor, score in scores.items())
        self.display.say(
            f"adapters learn at {self.rate:g} times the learning rate of all weights (score by "
            f"factor: {tried}; {usd(self.sweep_usd)})"
        )

    def _write_target(self, baseline: Trained) -> None:
        """Write down what the others have to reach, before any of them runs."""
        if self.target is not None or baseline.answers is None:
            return
        judged = self._compared([baseline])
        self.target = judged.target
        path = self.root / FOLDER / "target.json"
        content = {
            "study": digest(self.root, baseline.chain, self.params.align.method),
            "judge": judged.judge, "baseline": judged.variants[BASELINE],
            "margin": judged.margin, "target": self.target,
        }  # fmt: skip
        written = json.dumps(content, indent=1) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != written:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, written)
        quality = judged.variants[BASELINE]["quality"]
        self.display.say(
            f"target: {judged.judge.replace('_', ' ')} {decimal(quality)} of the baseline minus "
            f"{judged.margin:g} = {decimal(self.target)}"
        )

    def _line(self, done: Trained, number: int, of: int) -> str:
        """The line printed for a variant when it has been trained."""
        variant = done.variant
        where = f"{number}/{of}" + (f" of seed {done.seed}" if len(self.seeds) > 1 else "")
        if done.state.state != "done":
            return f"{variant.name:<26} {done.state.state}: {done.state.reason} ({where})"
        own = variant.own_stages
        cost = sum(done.costs[stage].usd for stage in own)
        planned = sum(done.plans[stage].usd.expected for stage in own)
        cost_text = f"{usd(cost)}, planned {usd(planned)}" if own else "no training"
        left = self._left(number, done.seed)
        return (
            f"{variant.name:<26} {cost_text}, {usd(sum(self.paid.values()))} so far, {where}{left}"
        )

    def _left(self, number: int, seed: int) -> str:
        """The time of the variants to come: as planned, times what those before it took over their
        plans.
        """
        took = sum(cost.seconds for each in self.trained for cost in each.costs.values())
        planned = sum(plan.seconds for each in self.trained for plan in each.plans.values())
        ahead = [
            self._ahead(each)
            for at, other in enumerate(self.seeds)
            if other >= seed
            for i, each in enumerate(self.variants(other), start=1)
            if at > self.seeds.index(seed) or i > number
        ]
        seconds = sum(ahead) * took / planned if planned else 0.0
        return f", about {duration(seconds)} left" if seconds else ""

    def _ahead(self, variant: Variant) -> float:
        """Planned seconds of the stages that a variant does not share, and of its answers."""
        if variant.missing:
            return 0.0
        own = [s.seconds for s in self.plan_of(variant).stages if s.stage in variant.own_stages]
        return ANSWER_SECONDS + sum(own)

    # ------------------------------------------------------------ judging

    def _compared(self, trained: Sequence[Trained]) -> Judged:
        """Qualities and differences, from a process that has the statistics."""
        answered: dict[str, list[str]] = {}
        for each in trained:
            if each.answers is not None:
                suffix = f"#{each.variant.best_of}" if each.variant.best_of else ""
                answered.setdefault(each.variant.name, []).append(f"{each.answers}{suffix}")
        sft = [
            str(self._answer(each.variant, each.chain, sft=True))
            for each in trained
            if each.variant.name == BASELINE
        ]
        folder = self.root / STUDIES
        content = {"confidence": self.params.evaluate.confidence, "baseline": BASELINE,
                   "variants": answered, "sft": sft}  # fmt: skip
        (folder / "study.json").write_text(json.dumps(content), encoding="utf-8")
        run_helper(
            folder, "training.levers.compare", ["study.json", "--out", "compared.json"], self.stop
        )
        found = json.loads((folder / "compared.json").read_text(encoding="utf-8"))
        return Judged(found["judge"], self.params.evaluate.confidence, found["variants"])

    def judge(self) -> Levers:
        """The result, from everything that was trained."""
        judged = self._compared(self.trained)
        first = self.seeds[0]
        found = [
            variant_result(
                variant,
                [each for each in self.trained if each.variant.name == variant.name],
                judged,
                self.plan_of(variant),
                self.sweep_usd if variant.name == self._first_adapter(first) else 0.0,
            )
            for variant in self.variants(first)
        ]
        costed = [each for each in map(costed_of, found) if each is not None]
        order, chosen = ranking(costed), choice(costed)
        chain = self.chain(self.variants(first)[0], first)
        return Levers(
            study=digest(self.root, chain, self.params.align.method),
            judge=judged.judge,
            margin=judged.margin,
            target=judged.target,
            seeds=self.seeds,
            confidence=judged.confidence,
            method=self.params.align.method,
            usd_per_hour=usd_per_device_hour(self.params),
            variants=found,
            frontier=frontier([each for each in self.trained if each.seed == first], judged),
            pareto=pareto(costed),
            pairs=order.pairs,
            pairs_ranked_right=order.share,
            wrong_pairs=list(order.wrong),
            chosen=chosen.name if chosen else None,
            best=chosen.best if chosen else None,
            regret=chosen.regret if chosen else None,
            total_usd=sum(self.paid.values()),
        )

    def _write_cheapest(self, found: Levers) -> None:
        """The params of the cheapest variant that is as good as the baseline."""
        if found.best is None:
            return
        variant = next(each for each in self.variants(self.seeds[0]) if each.name == found.best)
        write(variant.params, self.root / FOLDER / CHEAPEST)


def this_device() -> Device:
    """What this machine computes with: a GPU where there is one of NVIDIA's."""
    gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return Device(gpu=gpu, bf16=bf16_instructions() is not None)


def _with(params: Params, overlay: dict[str, Any]) -> Params:
    return validate(compose(params.model_dump(mode="json"), overlay), "levers")


def _has_adapter(variant: Variant) -> bool:
    changed = f"{variant.params.align.method}.lora."
    return not variant.missing and any(key.startswith(changed) for key in variant.changes)
