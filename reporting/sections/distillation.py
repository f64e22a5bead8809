"""The student: what it keeps of the aligned model, what it cost, and when that has paid off."""

from collections.abc import Iterator

from markupsafe import Markup

from reporting.inputs import Findings
from reporting.numbers import count, decimal, duration, percent, short, usd
from reporting.parts import card, missing, section, table

TITLE = "The student"
LEAD = "Trained to answer as the aligned model does."
SECONDS_PER_HOUR = 3600


def distillation_section(findings: Findings) -> Markup | None:
    """Nothing for a run that makes no student."""
    if findings.params.distill is None:
        return None
    metrics = findings.metrics["distill"]
    if not metrics or findings.value("evaluate", "win_rate_student") is None:
        return section("student", TITLE, None, missing("The student was not made or evaluated in this run."))
    size = findings.value("distill", "parameters_student")
    teacher = findings.value("distill", "parameters_teacher")
    lead = LEAD
    if size and teacher:
        lead = f"A model with {percent(size / teacher)} of the weights. {LEAD}"
    rows = [*_quality(findings), *_size(findings), *_cost(findings)]
    note = (
        "Quality kept: the student's gain over the SFT model, as a share of the aligned model's. "
        "Reply tokens per second: as measured while both answered the held-out prompts, "
        f"{findings.params.evaluate.batch_size} side by side."
    )
    numbers = table(["", "Student", "Aligned"], rows)
    return section("student", TITLE, lead, card("In numbers", numbers, note=note))


def _quality(findings: Findings) -> Iterator[list[str]]:
    value = findings.value
    kept = _interval(findings, "quality_kept")
    if kept is not None:
        yield ["Quality kept", kept, "100%"]
    judge = "gold" if value("evaluate", "gold_student") is not None else "reward"
    yield [
        "Gold score" if judge == "gold" else findings.params.reward_score_name.capitalize(),
        *(decimal(value("evaluate", f"{judge}_{model}")) for model in ("student", "aligned")),
    ]
    wins = _interval(findings, "win_rate_student")
    if wins is not None:
        yield ["Wins against the aligned model", wins, ""]


def _interval(findings: Findings, name: str) -> str | None:
    share, low, high = (findings.value("evaluate", f"{name}{end}") for end in ("", "_low", "_high"))
    if share is None or low is None or high is None:
        return None
    return f"{percent(share)} ({percent(low)} to {percent(high)})"


def _size(findings: Findings) -> Iterator[list[str]]:
    for stem, name in (("parameters", "Weights"), ("non_embedding_parameters", "Weights without embeddings")):
        sizes = [findings.value("distill", f"{stem}_{role}") for role in ("student", "teacher")]
        yield [name, *(short(size) if size is not None else "" for size in sizes)]
    rates = [findings.reply_rates.get(model) for model in ("student", "aligned")]
    if None not in rates:
        yield ["Reply tokens per second", *(count(rate) for rate in rates if rate is not None)]


def _cost(findings: Findings) -> Iterator[list[str]]:
    cost = findings.ledger.stage("distill")
    if cost is None:
        return
    yield ["Cost of the student", f"{usd(cost.usd)} in {duration(cost.seconds)}", ""]
    compared = findings.reconciled.stage("distill")
    if compared is not None and compared.total.planned_seconds is not None:
        planned = compared.total.planned_usd
        shown = f"{usd(planned)} in " if planned is not None else ""
        yield ["As planned", f"{shown}{duration(compared.total.planned_seconds)}", ""]
    tokens = paid_back_tokens(findings, cost.usd)
    if tokens is not None:
        yield ["Paid back after", f"{short(tokens)} reply tokens", ""]


def paid_back_tokens(findings: Findings, cost_usd: float) -> float | None:
    """Reply tokens after which the student has saved its cost compared with serving the aligned model: cost / (price
    per second x (1 / aligned tokens per second - 1 / student tokens per second)). None if the student is no faster, or
    was not measured.
    """
    student, aligned = (findings.reply_rates.get(model) for model in ("student", "aligned"))
    price = findings.ledger.usd_per_device_hour / SECONDS_PER_HOUR
    if student is None or aligned is None or student <= aligned or not price:
        return None
    return cost_usd / (price * (1 / aligned - 1 / student))
