"""The table of a study, from what its runs kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from config import jsonl
from config.records import kept_folder
from config.workspace.kept import kept_params
from config.workspace.study import StudyFile, StudyResult, VariantResult, Verdict
from costs.ledger.ledger import ledger
from costs.ledger.reconcile import read_plan, reconcile
from costs.levers.judgement import Costed, choice, ranking
from tasks.study.runs import Outcome, spent


class Run(NamedTuple):
    """A completed run."""

    qualities: list[float]
    """Of the reply to each prompt."""
    planned_usd: float
    measured_usd: float


def result(place: Path, study: StudyFile, outcomes: Sequence[Outcome]) -> StudyResult:
    """Every variant beside the first one."""
    rows = {
        (one.variant.name, one.variant.seed): _replies(place, one.run_id)
        for one in outcomes
        if one.run_id is not None
    }
    by_gold = all(row.get("gold_aligned") is not None for own in rows.values() for row in own)
    runs = {
        (one.variant.name, one.variant.seed): _run(place, one.run_id, by_gold)
        for one in outcomes
        if one.run_id is not None
    }
    base = next(iter(study.variants))
    found = [_variant(name, study, outcomes, runs, base) for name in study.variants]
    costed = [
        Costed(each.name, each.planned_usd or 0.0, each.measured_usd, each.verdict in SAME,
               each.quality or 0.0)
        for each in found
        if each.measured_usd
    ]  # fmt: skip
    chosen = choice(costed)
    return StudyResult(
        judge="gold" if by_gold else "win rate",
        margin=study.margin,
        variants=found,
        pairs_ranked_right=ranking(costed).share,
        regret=chosen.regret if chosen else None,
        spent_usd=spent(place),
    )


SAME: tuple[Verdict, ...] = ("base", "cheaper and as good", "as good")


def _replies(place: Path, run_id: str) -> list[dict[str, Any]]:
    return list(jsonl.plain(kept_folder(place, run_id) / "evaluation" / "samples.jsonl"))


def _run(place: Path, run_id: str, by_gold: bool) -> Run:
    params = kept_params(place, run_id)
    model = "student" if params.tracking.model == "student" else "aligned"
    compared = reconcile(read_plan(kept_folder(place, run_id)), ledger(place, params, run_id))
    return Run(
        [quality(row, model, by_gold) for row in _replies(place, run_id)],
        compared.total.planned_usd or 0.0,
        compared.total.measured_usd or 0.0,
    )


def quality(row: Mapping[str, Any], model: str, by_gold: bool) -> float:
    """The gold score of a reply; without one, whether the reward model prefers it to the SFT
    model's: 1, a tie 0.5, or 0.
    """
    if by_gold:
        return float(row[f"gold_{model}"])
    ours, theirs = row[f"reward_{model}"], row["reward_sft"]
    return 0.5 if ours == theirs else float(ours > theirs)


def _variant(
    name: str,
    study: StudyFile,
    outcomes: Sequence[Outcome],
    runs: Mapping[tuple[str, int], Run],
    base: str,
) -> VariantResult:
    own = [one for one in outcomes if one.variant.name == name]
    made = VariantResult(
        name=name,
        changes=study.variants[name],
        runs=[one.run_id for one in own if one.run_id is not None],
        verdict="not run",
        reason=next((one.reason for one in own if one.run_id is None), ""),
    )
    seeds = [seed for seed in study.seeds if {(name, seed), (base, seed)} <= runs.keys()]
    if made.reason or not seeds:
        return made
    mine, theirs = ([runs[which, seed] for seed in seeds] for which in (name, base))
    differences = [
        a - b
        for ours, others in zip(mine, theirs, strict=True)
        for a, b in zip(ours.qualities, others.qualities, strict=True)
    ]
    middle, low, high = interval(differences)
    usd, base_usd = (fmean(run.measured_usd for run in each) for each in (mine, theirs))
    return made.model_copy(
        update={
            "planned_usd": fmean(run.planned_usd for run in mine),
            "measured_usd": usd,
            "quality": fmean(q for run in mine for q in run.qualities),
            "difference": middle,
            "difference_low": low,
            "difference_high": high,
            "verdict": "base" if name == base else verdict(low, high, study.margin, usd < base_usd),
        }
    )


def interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of paired differences and its interval, of many prompts."""
    middle = fmean(differences)
    if len(differences) < 2:
        return middle, middle, middle
    half = NormalDist().inv_cdf((1 + confidence) / 2) * stdev(differences)
    half /= len(differences) ** 0.5
    return middle, middle - half, middle + half


def verdict(low: float, high: float, margin: float, cheaper: bool) -> Verdict:
    """Not worse where the whole interval is above minus the margin, worse where it is below."""
    if low >= -margin:
        return "cheaper and as good" if cheaper else "as good"
    return "worse" if high < -margin else "undecided"
