"""The comparison of levers: plan every variant, train each once per seed, score its replies, judge.

What is done stays done: the same command goes on from where it was stopped, and a lever that is
added later runs alone.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from config import jsonl
from config.compose import compose
from config.errors import CostError, OverBudget, ParamsError
from config.inputs import digest_files
from config.load import validate, write
from config.records import METHODS, SAMPLING_METHODS, MetricRow
from config.schema import Params
from config.workspace.levers import (
    FOLDER,
    LEVERS,
    FrontierPoint,
    Levers,
    VariantResult,
    keep,
)
from config.workspace.machine import bf16_instructions
from costs.levers.judgement import (
    Costed,
    Scored,
    choice,
    first_update_at,
    margin,
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
from costs.planning.cheaper import cheapest
from costs.planning.planner import plan
from costs.planning.plans import Plan, StagePlan
from costs.planning.target import target
from costs.tables.price import usd_per_device_hour
from reporting.numbers import decimal, duration, usd
from tasks.levers.processes import Ended, Spent, run_helper, run_stage, spent
from tasks.levers.stage_folders import (
    STUDIES,
    Chain,
    digest,
    lay_out,
    link_outputs,
    prepare,
    stage_folder,
    write_lock,
)
from tasks.run.code_version import HOME
from tasks.run.stop import StopRequest
from tasks.stage.progress import Display

ANSWERS = "answers.json"
SWEEP_SHARE = 3
"""A learning rate is tried on a third of the updates."""
CHEAPEST = "cheapest.yaml"


@dataclass
class Trained:
    """A variant with one seed."""

    variant: Variant
    seed: int
    chain: dict[str, Params]
    plans: dict[str, StagePlan]
    costs: dict[str, Spent] = field(default_factory=dict)
    state: Ended = field(default_factory=lambda: Ended("done"))
    answers: Path | None = None


class Study:
    """A comparison at work in a project."""

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
        self.started = time.monotonic()
        self.paid: dict[Path, float] = {}
        """Stage folder -> what it cost, each counted once."""
        self.trained: list[Trained] = []
        self.rate, self.sweep_usd = ADAPTER_RATE, 0.0
        self.target: float | None = None

    # ------------------------------------------------------------ variants and plans

    def variants(self, seed: int) -> list[Variant]:
        """Those that were asked for. Raises ParamsError for an unknown name."""
        params = _with(self.params, {"seed": seed})
        found = variants(params, this_device(), self._optimised(params), self.rate)
        known = [each.name for each in found]
        for name in self.only:
            if name not in known:
                raise ParamsError(f"--only {name} is not a variant. Known: {', '.join(known)}.")
        wanted = {BASELINE, *self.only} if self.only else set(known)
        return [each for each in found if each.name in wanted]

    def _optimised(self, params: Params) -> Params | None:
        """What `rlhf plan --optimise usd` would choose for the method."""
        try:
            return cheapest(params, self.aim, (params.align.method,), "usd").params
        except CostError:
            return None

    def plan_of(self, variant: Variant, root: Path | None = None) -> Plan:
        """Its plan, on this machine or, where it cannot run here, on a device that can. `root` is
        where prepared data tell how many rows there are.
        """
        aim = self.aim
        if variant.missing:
            aim = target(variant.params, HARDWARE_WITH_ALL, None, None, self.root)
        return plan(variant.params, replace(aim, root=root or self.root), variant.stages)

    def check_budget(self) -> None:
        """Refuse a comparison that is planned above budget.max_usd."""
        limit = self.params.budget.max_usd
        planned = self.planned_usd()
        if limit is not None and planned > limit:
            raise CostError(
                f"the comparison is planned at {planned:.4g} USD, budget.max_usd={limit:g} does "
                "not allow it. Raise it, or compare fewer levers with --only."
            )

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

    def planned_usd(self) -> float:
        return sum(stage.usd.expected for stage in self.planned())

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
        """Everything; raises StageStopped where it was asked to stop."""
        self.check_budget()
        planned = self.planned()
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
        done = Trained(variant, seed, chain, {})
        for stage in variant.stages:
            state, done.costs[stage] = self._make(chain, stage)
            if state.state != "done":
                done.state = Ended(state.state, f"{stage}: {state.reason}")
                break
        done.plans = {
            stage.stage: stage
            for stage in self.plan_of(variant, stage_folder(self.root, chain, "data")).stages
        }
        if done.state.state == "done":
            done.answers = self._answer(variant, chain)
        return done

    def _make(self, chain: Chain, stage: str) -> tuple[Ended, Spent]:
        """Run a stage after those that it reads, unless it has ended before."""
        self._within_budget()
        folder = prepare(self.root, chain, stage)
        state = run_stage(folder, chain[stage], stage, self.stop, self.display.show)
        if stage == "data":
            write_lock(folder, chain[stage])
        cost = spent(folder, chain[stage], stage)
        self.paid[folder] = cost.usd + cost.waste_usd
        return state, cost

    def _within_budget(self) -> None:
        limit, total = self.params.budget.max_usd, sum(self.paid.values())
        if limit is not None and total > limit:
            raise OverBudget(
                f"the comparison has cost {usd(total)}, budget.max_usd={limit:g}: raise it and run "
                "the same command to go on from there."
            )

    def _answer(self, variant: Variant, chain: Chain, sft: bool = False) -> Path:
        """The scored replies of a variant's model, or of the SFT model."""
        last = "sft" if sft or variant.best_of else variant.stages[-1]
        params = chain[variant.stages[-1]] if not variant.best_of else variant.params
        judge = dict.fromkeys(("data", "sft", "reward"), self.baseline(params.seed))
        self._make(judge, "reward")
        content = {
            "evaluate": params.evaluate.model_dump(mode="json"),
            "best_of": variant.best_of, "sft": sft,
            "stage": digest(self.root, chain, last),
            "reward": digest(self.root, judge, "reward"),
            "code": [
                hashlib.sha256((HOME / "training" / name).read_bytes()).hexdigest()
                for name in ("levers/answers.py", "inference/replies.py")
            ],
            "files": {str(path): text for path, text in digest_files(self.root, params).items()},
        }  # fmt: skip
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        folder = self.root / STUDIES / "answers" / f"{last}-{name}"
        if (folder / ANSWERS).exists():
            return folder / ANSWERS
        lay_out(self.root, folder, params)
        for stage in variant.stages:
            if stage != "reward":
                link_outputs(folder, stage_folder(self.root, chain, stage), stage)
        link_outputs(folder, stage_folder(self.root, judge, "reward"), "reward")
        options = ["--out", ANSWERS]
        if variant.best_of:
            options += ["--best-of", str(variant.best_of)]
        elif sft:
            options += ["--role", "sft"]
        elif last in SAMPLING_METHODS:
            rollouts = stage_folder(self.root, chain, last) / "runs" / last / "rollouts.jsonl"
            options += ["--rollouts", str(rollouts.resolve())]
        run_helper(folder, "training.levers.answers", options, self.stop)
        return folder / ANSWERS

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
        own = judged["variants"][BASELINE]
        self.target = own["quality"] - margin(judged["judge"])
        path = self.root / FOLDER / "target.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"baseline": own, "judge": judged["judge"], "margin": margin(judged["judge"]),
                   "target": self.target, "seed": baseline.seed}  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self.display.say(
            f"target: {judged['judge'].replace('_', ' ')} {decimal(own['quality'])} of the "
            f"baseline minus {margin(judged['judge']):g} = {decimal(self.target)}"
        )

    def _line(self, done: Trained, number: int, of: int) -> str:
        """What is said of a variant when it has been trained."""
        variant = done.variant
        where = f"{number}/{of}" + (f" of seed {done.seed}" if len(self.seeds) > 1 else "")
        if done.state.state != "done":
            return f"{variant.name:<26} {done.state.state}: {done.state.reason} ({where})"
        own = variant.own_stages
        cost = sum(done.costs[stage].usd for stage in own)
        planned = sum(done.plans[stage].usd.expected for stage in own)
        said = f"{usd(cost)}, planned {usd(planned)}" if own else "no training"
        left = self._eta(number, of, done.seed)
        return f"{variant.name:<26} {said}, {usd(sum(self.paid.values()))} so far, {where}{left}"

    def _eta(self, number: int, of: int, seed: int) -> str:
        total = of * len(self.seeds)
        at = self.seeds.index(seed) * of + number
        gone = time.monotonic() - self.started
        return f", about {duration(gone / at * (total - at))} left" if at < total else ""

    # ------------------------------------------------------------ judging

    def _compared(self, trained: Sequence[Trained]) -> dict[str, Any]:
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
        return dict(json.loads((folder / "compared.json").read_text(encoding="utf-8")))

    def judge(self) -> Levers:
        """The result, from everything that was trained."""
        judged = self._compared(self.trained)
        limit = margin(judged["judge"])
        baseline_quality = judged["variants"][BASELINE]["quality"]
        results = [
            self._result(variant, judged["variants"].get(variant.name), limit, baseline_quality)
            for variant in self.variants(self.seeds[0])
        ]
        costed = [
            Costed(each.name, each.planned_usd or 0.0, each.measured_usd, each.same_quality,
                   each.quality or 0.0)
            for each in results
            if each.state == "done" and each.measured_usd
        ]  # fmt: skip
        order, chosen = ranking(costed), choice(costed)
        chain = self.chain(self.variants(self.seeds[0])[0], self.seeds[0])
        return Levers(
            study=digest(self.root, chain, self.params.align.method),
            judge=judged["judge"],
            margin=limit,
            target=baseline_quality - limit,
            seeds=self.seeds,
            confidence=self.params.evaluate.confidence,
            method=self.params.align.method,
            usd_per_hour=usd_per_device_hour(self.params),
            variants=results,
            frontier=self._frontier(judged),
            pareto=pareto(costed),
            pairs=order.pairs,
            pairs_ranked_right=order.share,
            wrong_pairs=list(order.wrong),
            chosen=chosen.name if chosen else None,
            best=chosen.best if chosen else None,
            regret=chosen.regret if chosen else None,
            total_usd=sum(self.paid.values()),
        )

    def _result(
        self, variant: Variant, judged: dict[str, float] | None, limit: float, baseline: float
    ) -> VariantResult:
        own = [each for each in self.trained if each.variant.name == variant.name]
        common: dict[str, Any] = {
            "name": variant.name,
            "changes": dict(variant.changes),
            "seeds": len(own),
        }
        if variant.missing:
            return VariantResult(
                **common, state="not here", reason=variant.missing, hardware=HARDWARE_WITH_ALL,
                **_planned(variant, {s.stage: s for s in self.plan_of(variant).stages}),
            )  # fmt: skip
        failed = next((each for each in own if each.state.state != "done"), None)
        found = common | {"hardware": self.aim.hardware.name}
        found |= _mean_dicts([_costs(each) for each in own])
        if _has_adapter(variant) and variant.name == self._first_adapter(self.seeds[0]):
            found["sweep_usd"] = self.sweep_usd
        if failed is not None or judged is None:
            state = failed.state if failed else Ended("failed", "it has no answers")
            return VariantResult(**found, state=state.state, reason=state.reason)
        same = judged["difference_low"] >= -limit
        at_target = self._at_target(own, baseline - limit)
        return VariantResult(**found, state="done", **judged, same_quality=same, **at_target)

    def _at_target(self, own: Sequence[Trained], aim: float) -> dict[str, Any]:
        """When the method's own responses first reached the target, and what it had cost by then;
        means over seeds, nothing if one of them never did.
        """
        updates, costs = [], []
        for each in own:
            curve = _curve(each)
            at = first_update_at(curve, aim, self.params.evaluate.confidence)
            if at is None:
                return {}
            updates.append(at)
            costs.append(_cost_at(each, at))
        if not updates:
            return {}
        return {
            "updates_at_target": round(sum(updates) / len(updates)),
            "usd_at_target": sum(costs) / len(costs),
        }

    def _frontier(self, judged: dict[str, Any]) -> dict[str, list[FrontierPoint]]:
        """Quality against KL: along training for the methods that sample, else where they end."""
        found: dict[str, list[FrontierPoint]] = {}
        seed = self.seeds[0]
        for each in self.trained:
            if each.seed != seed or each.answers is None:
                continue
            variant = each.variant
            if variant.best_of:
                content = json.loads(each.answers.read_text(encoding="utf-8"))
                if judged["judge"] == "gold":
                    found["best-of-n"] = [
                        FrontierPoint(kl=one["kl"], quality=sum(one["golds"]) / len(one["golds"]))
                        for one in content["best_of"]
                    ]
                continue
            method = variant.params.align.method
            if variant.name not in (BASELINE, *METHODS):
                continue
            end = judged["variants"][variant.name]
            points = [FrontierPoint(kl=end["kl"], quality=end["quality"])]
            if judged["judge"] == "gold" and method in SAMPLING_METHODS:
                points = [*self._along(each), *points]
            found[method] = points
        return found

    def _along(self, each: Trained) -> list[FrontierPoint]:
        """KL and quality of the responses of each update."""
        method = each.variant.params.align.method
        metrics = stage_folder(self.root, each.chain, method) / "runs" / method / "metrics.jsonl"
        rows: list[MetricRow] = jsonl.read(metrics, MetricRow).rows
        kls = {row.step: row.values["kl"] for row in rows if "kl" in row.values}
        return [
            FrontierPoint(kl=kls[point.update], quality=point.mean)
            for point in _curve(each)
            if point.update in kls
        ]

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


def _planned(variant: Variant, plans: dict[str, StagePlan]) -> dict[str, float]:
    own = [plans[stage] for stage in variant.own_stages if stage in plans]
    if not own:
        return {}
    return {
        "planned_seconds": sum(stage.seconds for stage in own),
        "planned_usd": sum(stage.usd.expected for stage in own),
        "planned_total_usd": sum(stage.usd.expected for stage in plans.values()),
        "planned_peak_bytes": max(stage.peak_bytes_per_gpu for stage in own),
        "planned_flops": sum(phase.flops for stage in own for phase in stage.phases),
    }


def _costs(each: Trained) -> dict[str, float]:
    """Planned and measured figures of one seed."""
    found = _planned(each.variant, each.plans)
    own = [each.costs[stage] for stage in each.variant.own_stages if stage in each.costs]
    if not own:
        return found
    found |= {
        "measured_seconds": sum(cost.seconds for cost in own),
        "measured_usd": sum(cost.usd for cost in own),
        "measured_total_usd": sum(cost.usd for cost in each.costs.values()),
        "measured_peak_bytes": float(max(cost.peak_bytes for cost in own)),
        "waste_usd": sum(cost.waste_usd for cost in own),
    }
    tokens = sum(each.plans[stage].tokens for stage in each.variant.own_stages)
    if tokens and "planned_flops" in found:
        measured = sum(cost.tokens for cost in own)
        found["measured_flops"] = found["planned_flops"] * measured / tokens
    return found


def _mean_dicts(found: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = {key for each in found for key in each}
    return {
        key: sum(each[key] for each in found if key in each) / sum(key in each for each in found)
        for key in sorted(keys)
    }


def _curve(each: Trained) -> list[Scored]:
    if each.answers is None or each.variant.best_of:
        return []
    content = json.loads(each.answers.read_text(encoding="utf-8"))
    return [Scored(**point) for point in content.get("curve", [])]


def _cost_at(each: Trained, update: int) -> float:
    """US dollars until that update was made."""
    by_step = each.costs[each.variant.params.align.method].usd_by_step
    return max((cost for step, cost in by_step.items() if step <= update), default=0.0)
