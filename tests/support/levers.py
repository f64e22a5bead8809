"""A comparison of levers and a measurement of growth that could have been."""

from typing import Any

from config.workspace.levers import (
    FrontierPoint,
    Growth,
    GrowthPoint,
    Levers,
    Scale,
    State,
    VariantResult,
)


def variant(
    name: str, measured: float | None, quality: float | None, state: State = "done", **more: Any
) -> VariantResult:
    known = {} if quality is None else {
        "quality": quality, "quality_low": quality - 0.01, "quality_high": quality + 0.01,
        "difference": quality - 0.9, "difference_low": quality - 0.91,
        "difference_high": quality - 0.89, "kl": 2.0,
    }  # fmt: skip
    content = {
        "name": name, "state": state, "changes": {} if name == "baseline" else {"ppo.lam": 0.9},
        "hardware": "cpu", "measured_usd": measured, "planned_usd": 0.003,
        "measured_seconds": 30.0, "measured_peak_bytes": 2.0**29, "seeds": 1,
    }  # fmt: skip
    return VariantResult.model_validate(content | known | more)


def comparison(*more: VariantResult) -> Levers:
    """A baseline, a variant as good at half of its cost, one that is not, and `more`."""
    return Levers(
        study="0123456789ab", judge="gold", margin=0.02, target=0.88, seeds=[1], confidence=0.95,
        method="ppo", usd_per_hour=0.1,
        variants=[
            variant("baseline", 0.004, 0.9),
            variant("cheap", 0.002, 0.9, same_quality=True, usd_at_target=0.001),
            variant("worse", 0.001, 0.7),
            *more,
        ],
        frontier={
            "ppo": [FrontierPoint(kl=0.1, quality=0.6), FrontierPoint(kl=2, quality=0.9)],
            "best-of-n": [FrontierPoint(kl=0, quality=0.6), FrontierPoint(kl=1.8, quality=0.8)],
        },
        pareto=["worse", "cheap"], pairs=3, pairs_ranked_right=2 / 3,
        wrong_pairs=[("worse", "cheap")], chosen="cheap", best="cheap", regret=0.0,
        total_usd=0.02,
    )  # fmt: skip


def growth(factor: str = "model") -> Growth:
    points = [
        GrowthPoint(
            size=size, measured_seconds=size, planned_seconds=size, measured_usd=0.1,
            planned_usd=0.1, stages={"sft": {"measured": size, "planned": size}},
        )
        for size in (1.0, 2.0, 4.0)
    ]  # fmt: skip
    return Growth(
        factor=factor, unit="parameters", points=points, exponent=0.93, exponent_low=0.9,
        exponent_high=0.96, planned_exponent=0.95, by_stage={"sft": (0.93, 0.95)},
    )  # fmt: skip


def scale() -> Scale:
    return Scale(hardware="cpu", factors=[growth()], answer="Less than quadratic.", total_usd=0.01)
