"""Every figure of a run's report by its name on the page, recomputed from the run's files."""

import csv
from dataclasses import dataclass, field
from typing import Any

from tests.audit.accounts import Account, Accounts, Sum, rows_of

MODELS = {"base": "base", "sft": "sft", "aligned": "aligned"}
QUANTITIES = {
    "gold": "gold_score", "reward": "reward_model_score", "length": "reply_length_tokens",
    "eos_rate": "replies_that_end", "distinct_1": "distinct_words",
    "distinct_2": "distinct_word_pairs", "odd": "odd",
}  # fmt: skip
PANELS = {
    "sft": {
        "loss": {"train": "loss", "validation": "validation_loss", "test": "test_loss"},
        "token accuracy": {"train": "mean_token_accuracy", "held out": "eval_mean_token_accuracy"},
        "learning rate": {"rate": "learning_rate"},
    },
    "reward": {
        "loss": {"train": "loss", "validation": "validation_loss", "test": "test_loss"},
        "accuracy": {"train batch": "accuracy"},
        "margin": {"train batch": "margin"},
    },
    "ppo": {
        "score": {"score": "score"},
        "kl to sft": {"KL": "kl"},
        "entropy": {"entropy": "entropy"},
        "reply length": {"length": "length"},
        "replies that end": {"ended": "eos_rate"},
        "clipped ratios": {"policy": "clip_fraction", "value": "value_clip_fraction"},
        "explained variance": {"value model": "explained_variance"},
        "value loss": {"value": "value_loss"},
        "policy loss": {"policy": "policy_loss"},
        "ratio": {"mean ratio": "ratio"},
        "kl coefficient": {"coefficient": "kl_coef"},
        "gradient norm": {"before clipping": "grad_norm"},
    },
}
"""Stage -> title of a chart -> words of a curve -> the metric it draws."""
SPLITS = ("sft", "Demonstrations"), ("preference", "Preference pairs"), ("prompts", "Prompts")


@dataclass
class Figure:
    numbers: list[float | None] = field(default_factory=list)
    words: tuple[str, ...] = ()
    places: list[float] | None = None
    """Where marks are drawn, and how wide, as fractions of the axis."""


Figures = dict[tuple[str, str, str], Figure]


def curve(accounts: Accounts, stage: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of the attempts that made the outputs; what was repeated counts once."""
    made_by = accounts.noted[stage]["attempt"]
    events = rows_of(accounts.root / "runs" / stage / "attempts.jsonl")
    maker = next(row["run_id"] for row in events if row["attempt"] == made_by)
    rows = rows_of(accounts.root / "runs" / stage / "metrics.jsonl")
    values = {
        row["step"]: row["values"][metric] for row in rows if row["attempt"] <= made_by and row["run_id"] == maker
    }
    return sorted(values.items())


def error(planned: float | None, measured: float | None) -> float | None:
    return None if planned is None or not measured else (planned - measured) / measured


def report_figures(accounts: Accounts) -> Figures:
    figures: Figures = {}
    for part in (_tiles, _evaluation, _stages, _plans, _phases, _frontier, _reward, _data):
        figures |= part(accounts)
    return figures


def _tiles(accounts: Accounts) -> Figures:
    judged, reward = accounts.metrics("evaluate"), accounts.metrics("reward")
    spent = [account.spent.peak_bytes for account in accounts.stages.values()]
    largest = list(accounts.stages)[spent.index(max(spent))]
    tiles = {
        "gold_score": Figure([judged["gold_aligned"], judged["gold_sft"]]),
        "right_item": Figure([judged["right_item_rate"], judged["right_item_rate_sft"]]),
        "wins_over_sft": Figure([judged[f"win_rate_gold{end}"] for end in ("", "_low", "_high")], ("gold score",)),
        "reward_accuracy": Figure([reward["accuracy"], reward["bayes_accuracy"]]),
        "calibration_error": Figure([reward["ece"], 0]),
        "kl_to_sft": Figure([judged["kl"]]),
        "time": Figure([accounts.seconds]),
        "cost": Figure([accounts.usd, accounts.wasted_usd], ("wasted",))
        if accounts.wasted_usd
        else Figure([accounts.usd], ("nothing wasted",)),
        "peak_memory": Figure([max(spent)], (f"in stage {largest}",)),
    }
    return {("", "", name): figure for name, figure in tiles.items()}


def _place(value: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _estimate(
    value: float, bounds: tuple[float, float] | None, low: float, high: float,
    mark: float | None = None, words: tuple[str, ...] = (),
) -> Figure:  # fmt: skip
    places = [] if mark is None else [_place(mark, low, high)]
    if bounds is not None:
        ends = [_place(end, low, high) for end in bounds]
        places += [ends[0], ends[1] - ends[0]]
    return Figure([value], words, [*places, _place(value, low, high)])


def _bounds(metrics: dict[str, Any], name: str) -> tuple[float, float] | None:
    return (metrics[f"{name}_low"], metrics[f"{name}_high"]) if f"{name}_low" in metrics else None


def _evaluation(accounts: Accounts) -> Figures:
    judged = accounts.metrics("evaluate")
    figures: Figures = {}
    for model in MODELS:
        name = f"gold_{model}"
        figures["evaluation", "Gold score", model] = _estimate(judged[name], _bounds(judged, name), 0, 1)
        name = f"reward_{model}"  # drawn between round numbers, which the page names
        figures["evaluation", "Reward-model score", model] = Figure([judged[name]])
    for kind, name in (("gold", "gold_score"), ("reward", "reward_model")):
        figures["evaluation", "Wins over SFT", name] = _estimate(
            judged[f"win_rate_{kind}"], _bounds(judged, f"win_rate_{kind}"), 0, 1, 0.5
        )
    for stem, quantity in QUANTITIES.items():
        for model in MODELS:
            cell = Figure([judged[f"{stem}_{model}"]])
            figures["evaluation", "", f"{quantity}.{model}"] = cell
    return figures


def _stages(accounts: Accounts) -> Figures:
    figures: Figures = {}
    for stage, account in accounts.stages.items():
        spent, remarks, words = account.spent, [], [account.state]
        if account.cached:
            remarks += [account.made_usd, account.made_seconds]
            words.append("saved")
        if account.attempts > 1:
            remarks.append(account.attempts)
            words.append("attempts")
        if account.wasted.seconds:
            remarks += [account.wasted.seconds, account.wasted.usd]
            words.append("done twice")
        cells = {
            "time": Figure([spent.seconds]),
            "cost": Figure([spent.usd]),
            "peak_memory": Figure([spent.peak_bytes or None]),
            "result": Figure(list(remarks), tuple(words)),
            "key_figure": key_figure(stage, accounts.metrics(stage)),
        }
        figures |= {("cost", "", f"{stage}.{name}"): cell for name, cell in cells.items()}
        if spent.seconds:
            share = [spent.seconds, spent.usd, spent.seconds / accounts.seconds]
            figures["cost", "Share of each stage", stage] = Figure(list(share))
    if accounts.outside_seconds >= 1:
        outside = {"time": Figure([accounts.outside_seconds]), "cost": Figure([None]), "result": Figure([], ("not",))}
        outside |= {name: Figure() for name in ("peak_memory", "key_figure")}
        figures |= {("cost", "", f"outside_stages.{name}"): cell for name, cell in outside.items()}
    total = {"time": Figure([accounts.seconds]), "cost": Figure([accounts.usd])}
    total |= {name: Figure() for name in ("peak_memory", "result", "key_figure")}
    return figures | {("cost", "", f"total.{name}"): cell for name, cell in total.items()}


def key_figure(stage: str, metrics: dict[str, Any]) -> Figure:
    if not metrics:
        return Figure([None])
    match stage:
        case "data":
            refused = metrics["rows_quarantined"]
            kept = [metrics["rows_kept"]]
            return Figure([*kept, refused], ("refused",)) if refused else Figure(kept, ("rows",))
        case "sft":
            return Figure([metrics["eval_loss"]], ("eval loss",))
        case "reward":
            return Figure([metrics["accuracy"], metrics["bayes_accuracy"]], ("accuracy",))
        case "evaluate":
            return Figure([metrics["gold_sft"], metrics["gold_aligned"]], ("gold",))
        case _:
            return Figure([metrics["score"], metrics["kl"]], ("score", "KL"))


def comparison(
    accounts: Accounts, stage: str, planned: dict[str, Any] | None, made: Sum | None
) -> dict[str, float | None]:
    """Plan beside measurement of a phase or stage, by the keys of `rlhf report --json`. A phase that a stage never
    came to took no time.
    """
    peak = (planned or {}).get("peak_bytes", (planned or {}).get("peak_bytes_per_gpu")) or None
    measured = made or (Sum() if accounts.stages[stage].made else None)
    seconds = planned["seconds"] if planned else None
    result = {
        "planned_seconds": seconds,
        "measured_seconds": measured.seconds if measured else None,
        "planned_usd": accounts.planned_usd(stage, seconds) if seconds is not None else None,
        "measured_usd": measured.usd if measured else None,
        "planned_peak_bytes": peak,
        "measured_peak_bytes": made.peak_bytes if made else None,
    }
    return result | {
        "error": error(seconds, result["measured_seconds"]),
        "error_peak_bytes": error(peak, result["measured_peak_bytes"]),
    }


def whole(account: Account) -> Sum | None:
    """The phases of the work that made a stage's outputs, added up."""
    if not account.made:
        return None
    peak = max(phase.peak_bytes for phase in account.made.values())
    return Sum(account.made_seconds, account.made_usd, peak_bytes=peak)


def comparisons(accounts: Accounts, stage: str) -> dict[str, dict[str, float | None]]:
    """Phase -> plan and measurement, `all` for the stage."""
    planned, account = accounts.planned(stage), accounts.stages[stage]
    phases = {phase["phase"]: phase for phase in (planned or {}).get("phases", [])}
    names = dict.fromkeys([*phases, *account.made])
    result = {name: comparison(accounts, stage, phases.get(name), account.made.get(name)) for name in names}
    return result | {"all": comparison(accounts, stage, planned, whole(account))}


def total_comparison(accounts: Accounts) -> dict[str, float | None]:
    planned, measured, planned_usd, measured_usd = accounts.planned_total()
    both = [comparisons(accounts, stage)["all"] for stage in accounts.compared()]
    peaks = [[side[f"{of}_peak_bytes"] or 0 for side in both] for of in ("planned", "measured")]
    return {
        "planned_seconds": planned, "measured_seconds": measured, "planned_usd": planned_usd,
        "measured_usd": measured_usd, "planned_peak_bytes": max(peaks[0]),
        "measured_peak_bytes": max(peaks[1]), "error": error(planned, measured),
        "error_peak_bytes": error(max(peaks[0]), max(peaks[1])),
    }  # fmt: skip


COLUMNS = {
    "planned": "planned_seconds", "measured": "measured_seconds", "error": "error",
    "planned_cost": "planned_usd", "measured_cost": "measured_usd",
    "planned_peak": "planned_peak_bytes", "measured_peak": "measured_peak_bytes",
    "error_of_peak": "error_peak_bytes",
}  # fmt: skip


def _plans(accounts: Accounts) -> Figures:
    figures: Figures = {}
    longest = max(
        seconds or 0.0
        for stage in accounts.compared()
        for name, seconds in comparisons(accounts, stage)["all"].items()
        if name.endswith("_seconds")
    )
    for stage in accounts.stages:
        for phase, sides in comparisons(accounts, stage).items():
            for column, key in COLUMNS.items():
                value = sides[key]
                if "peak" in column and "error" not in column:
                    value = value or None
                figures["cost", "", f"{stage}.{phase}.{column}"] = Figure([value])
    for stage in accounts.compared():
        sides = comparisons(accounts, stage)["all"]
        planned, measured = sides["planned_seconds"] or 0.0, sides["measured_seconds"] or 0.0
        card = "cost", "Planned and measured"
        figures[*card, f"{stage}_planned"] = Figure([planned], places=[planned / longest])
        figures[*card, f"{stage}_measured"] = Figure([measured, sides["error"]], places=[measured / longest])
    total = total_comparison(accounts)
    return figures | {("cost", "", f"total.{column}"): Figure([total[key]]) for column, key in COLUMNS.items()}


def _phases(accounts: Accounts) -> Figures:
    figures: Figures = {}
    for stage, account in accounts.stages.items():
        for name, phase in account.phases.items():
            rate = phase.tokens / phase.seconds if phase.tokens else None
            cells = {
                "time": phase.seconds, "cost": phase.usd, "tokens": phase.tokens or None,
                "tokens_s": rate, "peak_memory": phase.peak_bytes or None,
            }  # fmt: skip
            figures |= {("cost", "", f"{stage}.{name}.{column}"): Figure([value]) for column, value in cells.items()}
    aligned = accounts.stages["ppo"].phases
    longest = max(phase.seconds for phase in aligned.values())
    fastest = max(phase.tokens / phase.seconds for phase in aligned.values())
    for name, phase in aligned.items():
        figures["cost", "Phases of ppo", name] = Figure([phase.seconds, phase.usd], places=[phase.seconds / longest])
        if phase.tokens:
            rate = phase.tokens / phase.seconds
            figures["cost", "Tokens per second", name] = Figure([rate], places=[rate / fastest])
    return figures


def _frontier(accounts: Accounts) -> Figures:
    kl = dict(curve(accounts, "ppo", "kl"))
    updates = [(step, kl[step], score) for step, score in curve(accounts, "ppo", "score")]
    best = max(updates, key=lambda update: update[2])
    rows = {"first": updates[0], "highest_score": best, "last": updates[-1]}
    return {
        ("frontier", "", f"{row}.{column}"): Figure([value])
        for row, values in rows.items()
        for column, value in zip(("update", "kl", "score"), values, strict=True)
    }


def _reward(accounts: Accounts) -> Figures:
    reward, data = accounts.metrics("reward"), accounts.metrics("data")
    rows = {
        "reward_model": "accuracy", "best_possible": "bayes_accuracy", "bag_of_words":
        "baseline_bow", "longer_reply_wins": "baseline_longer_wins",
    }  # fmt: skip
    ends = {name: _bounds(reward, name) or _bounds(data, name) for name in rows.values()}
    low = min(0.5, *(ends[name][0] if ends[name] else reward[name] for name in rows.values()))  # type: ignore[index]
    figures = {
        ("reward", "Accuracy", row): _estimate(reward[name], ends[name], low, 1.0) for row, name in rows.items()
    }
    facts = {
        "calibration_error_ece": "ece", "mean_margin": "margin_mean", "score_mean": "score_mean",
        "score_deviation": "score_std", "training_pairs": "train_pairs", "steps": "steps",
        "pairs_too_long": "pairs_too_long",
    }  # fmt: skip
    return figures | {("reward", "", f"{row}.value"): Figure([reward[name]]) for row, name in facts.items()}


def _data(accounts: Accounts) -> Figures:
    data = accounts.metrics("data")
    figures: Figures = {}
    columns = {
        "rows": "rows", "prompts": "unique_prompts", "mean_tokens": "tokens_mean",
        "median": "tokens_p50", "95th": "tokens_p95", "longest": "tokens_max",
    }  # fmt: skip
    for name, title in SPLITS:
        row = title.lower().replace(" ", "_")
        for split in ("train", "test"):
            for column, key in columns.items():
                figures["data", "", f"{row}.{split}.{column}"] = Figure([data[f"{name}_{split}_{key}"]])
    reasons = {"too_long": "quarantined_too_long", "empty_reply": "quarantined_empty_reply"}
    most = max(data[key] for key in reasons.values())
    return figures | {
        ("data", "Refused rows", name): Figure([data[key]], places=[data[key] / most]) for name, key in reasons.items()
    }


def sequences(accounts: Accounts) -> int:
    """Of the compared replies, whose lengths are drawn."""
    with accounts.file("plots/data_lengths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return sum(int(row["sequences"]) for row in rows if row["dataset"] == "preference")
