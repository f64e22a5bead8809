"""The training data: rows and lengths per split, what was refused and why."""

from collections.abc import Mapping

from markupsafe import Markup

from reporting.charts import Part, bar_list, column_chart
from reporting.inputs import Findings, finite
from reporting.numbers import ABSENT, count, decimal, percent
from reporting.parts import bullets, card, grid, missing, paragraph, section, table, tagged

DATASETS = {
    "sft": "Demonstrations",
    "preference": "Preference pairs",
    "ratings": "Rated replies",
    "prompts": "Prompts",
}
SPLITS = ("train", "test")
REASON = "quarantined_"
REMARKS = {
    "ties_dropped": "ties among annotators, dropped",
    "sft_duplicates": "duplicate demonstrations, dropped",
    "preference_duplicates": "duplicate pairs, dropped",
    "ratings_duplicates": "duplicate ratings, dropped",
    "prompts_duplicates": "duplicate prompts, dropped",
    "contradictory_pairs": "pairs that contradict another, kept",
    "replies_unranked": "replies without a rank, not paired",
}


def data_section(findings: Findings) -> Markup:
    """Splits, lengths, quarantine."""
    if not findings.metrics["data"]:
        return section("data", "Data", None, missing("The stage data has no results in this run."))
    lead = "Split by prompt: no prompt is in both train and test."
    return section(
        "data", "Data", lead, _splits(findings), grid(_lengths(findings), _quarantine(findings), _labels(findings))
    )


def _splits(findings: Findings) -> Markup:
    rows = []
    for name, title in DATASETS.items():
        for split in SPLITS:
            value = {
                key: findings.value("data", f"{name}_{split}_{key}")
                for key in ("rows", "unique_prompts", "tokens_mean", "tokens_p50", "tokens_p95", "tokens_max")
            }
            if value["rows"] is not None and (value["rows"] or name != "ratings"):
                rows.append(
                    [
                        title,
                        split,
                        *(count(value[key]) for key in ("rows", "unique_prompts")),
                        decimal(value["tokens_mean"]),
                        *(count(value[key]) for key in ("tokens_p50", "tokens_p95", "tokens_max")),
                    ]
                )
    if not rows:
        return missing("The stage data wrote no row counts.")
    return table(
        ["Dataset", "Split", "Rows", "Prompts", "Mean tokens", "Median", "95th", "Longest"], rows, numbers=range(2, 8)
    )


def _lengths(findings: Findings) -> Markup:
    """Histogram of the compared or rated sequences, train and test together."""
    bins: dict[float, float] = {}
    for row in findings.plots.get("data_lengths", []):
        edge, sequences = _number(row.get("tokens")), _number(row.get("sequences"))
        if row.get("dataset") in ("preference", "ratings") and edge is not None and sequences is not None:
            bins[edge] = bins.get(edge, 0.0) + sequences
    edges = sorted(bins)
    title = "Length of the compared replies"
    if len(edges) < 2:
        return card(title, missing("No histogram was written for this run."))
    width = edges[1] - edges[0]
    picture = column_chart(
        [(edge, edge + width, bins[edge]) for edge in edges],
        f"{title}: {count(sum(bins.values()))} sequences",
        "tokens, prompt and reply",
    )
    return card(title, picture, note=f"What the model reads, {count(sum(bins.values()))} sequences.")


def _quarantine(findings: Findings) -> Markup:
    """Refused rows by reason."""
    metrics = findings.metrics["data"]
    reasons = _reasons(metrics)
    read, refused = findings.value("data", "rows_read"), findings.value("data", "rows_quarantined")
    share = f" ({percent(refused / read)})" if refused and read else ""
    description = (
        f"{count(refused)} of {count(read)} rows{share} were refused and kept in "
        "data/prepared/quarantine.jsonl, each with its reason."
    )
    if not reasons:
        return card("Refused rows", paragraph("None." if refused == 0 else description))
    parts = [
        Part(reason, size, count(size), "c5") for reason, size in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    return card("Refused rows", bar_list(parts, "Refused rows by reason"), note=description)


def _reasons(metrics: Mapping[str, object]) -> dict[str, float]:
    return {
        name.removeprefix(REASON).replace("_", " "): size
        for name, value in metrics.items()
        if name.startswith(REASON) and (size := finite(value))
    }


def _labels(findings: Findings) -> Markup:
    """Balance of the labels, the trivial baselines, and rows that were dropped or kept with a remark."""
    facts = []
    for name, shown in (
        ("chosen_longer", "of the preferred replies are the longer one"),
        ("chosen_first", "of them were shown first"),
    ):
        if (share := findings.value("data", name)) is not None:
            facts.append((percent(share), shown))
    if (gold := findings.value("data", "gold_sft_mean")) is not None:
        facts.append((decimal(gold), "mean gold score of the demonstrations"))
    for name, shown in (
        ("baseline_longer_wins", "right by taking the longer reply"),
        ("baseline_bow", "right by a bag of words"),
    ):
        if (accuracy := findings.value("data", name)) is not None:
            facts.append((percent(accuracy), shown))
    facts += [(count(number), shown) for name, shown in REMARKS.items() if (number := findings.value("data", name))]
    facts += [
        (count(number), f"demonstrations {shown} at sft.max_length")
        for name, shown in (("demonstrations_cut", "cut"), ("demonstrations_dropped", "left out"))
        if (number := findings.value("sft", name))
    ]
    items = [[tagged("b", number), " ", shown] for number, shown in facts]
    return card("Labels and repeats", bullets(items) if items else missing(ABSENT))


def _number(cell: str | None) -> float | None:
    try:
        return finite(float(cell or ""))
    except ValueError:
        return None
