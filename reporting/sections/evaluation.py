"""Did alignment work: base, SFT and aligned model on held-out prompts, and the score bought with each nat of KL."""

from collections.abc import Iterator

from markupsafe import Markup

from config.methods.registry import OFFLINE_METHODS, SAMPLING_METHODS
from reporting.charts import Estimate, estimates, frontier_chart, ticks
from reporting.inputs import Findings, finite
from reporting.numbers import ABSENT, count, decimal, memory, percent
from reporting.parts import badge, card, grid, missing, paragraph, section, table

NAMES = {"base": "Base", "sft": "SFT", "aligned": "Aligned", "student": "Student"}
QUANTITIES = {
    "gold": "Gold score",
    "reward": "Reward score",
    "length": "Reply length (tokens)",
    "eos_rate": "Replies that end",
    "distinct_1": "Distinct words",
    "distinct_2": "Distinct word pairs",
}
"""Metric stems of metrics/evaluate.json, in the order of the table."""
REMEDIES = {
    method: f"raise {method}.kl.coef, or end earlier with {method}.max_kl or fewer updates"
    for method in SAMPLING_METHODS
}
"""align.method -> advice against over-optimisation."""
SHARES = ("eos_rate", "distinct_1", "distinct_2")


def evaluation_section(findings: Findings) -> Markup:
    """Scores by model, win rates, and other changes."""
    metrics = findings.metrics["evaluate"]
    if not metrics:
        return section(
            "evaluation", "Did alignment work?", None, missing("The stage evaluate has no results in this run.")
        )
    prompts = findings.value("evaluate", "prompts")
    lead = (
        f"Each model answers the same {count(prompts)} held-out prompts."
        if prompts
        else "Each model answers the same held-out prompts."
    )
    cards = [_scores("gold", findings), _scores("reward", findings), _win_rates(findings)]
    return section(
        "evaluation",
        "Did alignment work?",
        lead,
        grid(*cards),
        _judge(findings),
        _hacking(findings),
        _comparison(findings),
        _quantised(findings),
    )


def frontier_section(findings: Findings) -> Markup:
    """Score against KL: the gain of each step away from the SFT model."""
    method = findings.params.align.method
    curves = findings.curves.get(method, {})
    kl = dict(curves.get("kl", []))
    updates = [(int(step), kl[step], score) for step, score in curves.get("score", []) if step in kl]
    title = "Score against KL"
    if method in OFFLINE_METHODS:
        return _endpoints(findings, title)
    if not updates:
        return section("frontier", title, None, missing(f"The stage {method} logged no score and KL in this run."))
    first, last, best = updates[0], updates[-1], max(updates, key=lambda update: update[2])
    description = ", ".join(
        f"update {update}: KL {decimal(kl)}, score {decimal(score)}" for update, kl, score in (first, best, last)
    )
    picture = frontier_chart(
        updates,
        f"Score against KL over {len(updates)} updates. {description}",
        "KL (nats per reply)",
        findings.params.reward_score_name,
    )
    rows = [[name, str(update), decimal(kl), decimal(score)] for name, (update, kl, score) in
            (("First", first), ("Highest score", best), ("Last", last))]  # fmt: skip
    lead = "KL is how far the policy has moved from the SFT model. Each nat should increase the score."
    note = (
        "Where the curve flattens, a nat gains little score. One that bends down, "
        f"or a score that rises while replies get no better, is over-optimising: {REMEDIES[method]}."
    )
    dots = card(
        "What each step away from SFT bought",
        picture,
        note="One dot per update, from pale (first) to dark and large (last).",
    )
    numbers = card("In numbers", table(["", "Update", "KL", "Score"], rows), note=note)
    return section("frontier", title, lead, grid(dots, numbers, kind="halves"))


def _endpoints(findings: Findings, title: str) -> Markup:
    """For a method that samples no replies during training: score and KL before and after, from the evaluation."""
    method = findings.params.align.method
    kl, before, after = (findings.value("evaluate", name) for name in ("kl", "reward_sft", "reward_aligned"))
    lead = (
        f"{method.upper()} samples no replies while it trains, so score and KL are known of its two ends only, "
        "on the held-out prompts."
    )
    if kl is None or before is None or after is None:
        return section("frontier", title, None, missing("The stage evaluate measured no score and KL in this run."))
    rows = [["SFT", decimal(0.0), decimal(before)], [method.upper(), decimal(kl), decimal(after)]]
    note = f"If the score rises and replies get no better, raise {method}.beta or train fewer epochs."
    return section(
        "frontier", title, lead, card("In numbers", table(["", "KL (nats per reply)", "Score"], rows), note=note)
    )


def models(findings: Findings) -> list[str]:
    """The models that were evaluated, in order."""
    metrics = findings.metrics["evaluate"]
    return [name for name in NAMES if name != "student" or f"reward_{name}" in metrics]


def quantity(stem: str, findings: Findings) -> str:
    """The name of a metric of metrics/evaluate.json."""
    if stem == "reward":
        return findings.params.reward_score_name.capitalize()
    return QUANTITIES.get(stem, stem)


def _scores(kind: str, findings: Findings) -> Markup:
    """The mean score of each model, one dot each."""
    name = quantity(kind, findings)
    values = {model: findings.value("evaluate", f"{kind}_{model}") for model in models(findings)}
    if all(value is None for value in values.values()):
        absent = (
            f"This data has no gold score: only the {findings.params.reward_name} and people can judge the replies."
        )
        return card(name, missing(absent if kind == "gold" else "Not measured."))
    rows = []
    for model, value in values.items():
        if value is not None:
            low, high = (findings.value("evaluate", f"{kind}_{model}_{end}") for end in ("low", "high"))
            rows.append(Estimate(NAMES[model], value, decimal(value), model, low, high))
    axis = [0.0, 1.0] if kind == "gold" else ticks(min(row.value for row in rows), max(row.value for row in rows))
    description = ", ".join(f"{row.name} {row.shown}" for row in rows)
    note = (
        "The true quality of a reply in this world, 0 to 1. Training never sees it."
        if kind == "gold"
        else f"What alignment maximises: a stand-in for quality. Axis from {decimal(axis[0])} to {decimal(axis[-1])}."
    )
    return card(name, estimates(rows, f"{name} by model: {description}", axis[0], axis[-1]), note=note)


def _win_rates(findings: Findings) -> Markup:
    """Aligned against SFT by each judge, with intervals."""
    rows, reward = [], findings.params.reward_name.capitalize()
    for kind, judge in (("gold", "Gold score"), ("judge", "Judge"), ("reward", reward)):
        rate, low, high = (findings.value("evaluate", f"win_rate_{kind}{end}") for end in ("", "_low", "_high"))
        if rate is not None:
            rows.append(Estimate(judge, rate, percent(rate), "aligned", low, high))
    if not rows:
        return card("Wins over SFT", missing("No comparison was made."))
    confidence = findings.value("evaluate", "confidence") or findings.params.evaluate.confidence
    ties = [
        count(ties)
        for kind in ("gold", "judge", "reward")
        if (ties := findings.value("evaluate", f"ties_{kind}")) is not None
    ]
    tied = f" Ties count half: {' and '.join(ties)}." if ties else ""
    spans = "; ".join(f"{row.name} {row.shown}, {percent(row.low)} to {percent(row.high)}" for row in rows)
    note = f"Whiskers: {percent(confidence, 0)} intervals ({spans}).{tied}"
    return card(
        "Wins over SFT",
        estimates(rows, f"Win rate of the aligned model over SFT: {spans}", 0.0, 1.0, 0.5, "50%, no difference"),
        note=note,
    )


def _judge(findings: Findings) -> Markup | None:
    """How good the judge is, and what it says."""
    metrics = findings.metrics["evaluate"]
    if metrics.get("judge") is None:
        return None

    def share(name: str) -> str:
        value, low, high = (findings.value("evaluate", f"{name}{end}") for end in ("", "_low", "_high"))
        span = f" ({percent(low)} to {percent(high)})" if low is not None else ""
        return ABSENT if value is None else f"{percent(value)}{span}"

    pairs = count(findings.value("evaluate", "judge_pairs"))
    rows = [
        [f"Agrees with people on {pairs} held-out pairs", share("judge_accuracy")],
        ["Preferring the longer reply would agree with", share("judge_longer_wins")],
        ["Agrees where people prefer the shorter reply", share("judge_accuracy_shorter")],
        ["Changes its mind when the replies change places", share("position_flip_rate")],
        ["Aligned wins over SFT", share("win_rate_judge")],
        ["The same at equal length", share("win_rate_judge_length_controlled")],
        ["Smallest distance from 50% that would show", share("judge_smallest_effect")],
    ]
    fault = metrics.get("judge_fault")
    answer = badge("no verdict", "open") if fault else badge("its verdict counts", "good")
    fault_note = f"{fault[:1].upper()}{fault[1:]}." if fault else None
    note = "A judge that people's own preferences do not bear out gives no verdict on replies."
    body = table(["", "Share"], rows)
    return card(f"The judge: {metrics['judge']}", paragraph([answer, " ", fault_note]), body, note=note)


def _hacking(findings: Findings) -> Markup | None:
    """The reward-hacking verdict with its evidence."""
    metrics = findings.metrics["evaluate"]
    if "reward_hacking" not in metrics:
        return None
    hacked = metrics["reward_hacking"]
    reason = str(metrics.get("reward_hacking_reason") or "").strip()
    explanation = f"{reason[:1].upper()}{reason[1:]}." if reason else None
    undecided = badge("not enough evidence", "open")
    answer = {True: badge("reward hacking", "bad"), False: badge("no reward hacking", "good")}.get(hacked, undecided)
    note = (
        "Reward hacking: the score rises significantly while quality hardly does. If it is "
        "undecided, use more held-out prompts: evaluate.prompts and data.test_fraction."
    )
    return card("Was the reward hacked?", paragraph([answer, " ", explanation]), note=note)


def _quantised(findings: Findings) -> Markup | None:
    """The GGUF files of the run's export beside the trained model."""
    if not findings.quantised:
        return None
    rows = [
        [
            quantised.kind,
            memory(quantised.bytes),
            f"{count(quantised.flips)} of {count(quantised.prompts)}",
            f"{gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})",
        ]
        for quantised in findings.quantised
        for gain in [quantised.difference]
    ]
    judge = findings.quantised[0].judge
    return card(
        "What quantising changes",
        table(["Weights", "Size", "Replies that differ", f"Change of the {judge}"], rows),
        note="GGUF files of the export against the trained model: greedy replies to the same "
        "held-out prompts, with paired intervals.",
    )


def _comparison(findings: Findings) -> Markup:
    """Every measurement of each model: known quantities first, then the rest."""
    names = models(findings)
    rows = [
        [quantity(stem, findings), *(_shown(stem, findings.value("evaluate", f"{stem}_{model}")) for model in names)]
        for stem in _stems(findings)
    ]
    return table(["On held-out prompts", *(NAMES[model] for model in names)], rows)


def _stems(findings: Findings) -> Iterator[str]:
    metrics = findings.metrics["evaluate"]
    stems = [stem for stem in QUANTITIES if any(finite(metrics.get(f"{stem}_{model}")) is not None for model in NAMES)]
    yield from stems
    suffix = "_aligned"
    others = (
        name.removesuffix(suffix)
        for name, value in metrics.items()
        if name.endswith(suffix) and finite(value) is not None
    )
    yield from (stem for stem in others if stem not in stems)


def _shown(stem: str, value: float | None) -> str:
    return percent(value) if stem in SHARES else decimal(value)
