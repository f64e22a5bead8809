"""The head of the page: what was trained, the verdict, and the figures to take away."""

from collections.abc import Iterator

from markupsafe import Markup

from config.methods.registry import RECORDS
from config.schema import Params
from config.sections.data import FileSource, HubSource, PythonSource
from costs.ledger.ledger import Ledger
from reporting import parts
from reporting.inputs import NO_RUN, Findings
from reporting.numbers import ABSENT, count, decimal, duration, memory, moment, percent, short, usd
from reporting.verdict import verdict

RUN_NAMES = {"manual": "stages started by hand", NO_RUN: "a run that was not recorded here"}
"""Ledger.state of stages that no pipeline run made -> how to describe it."""


def masthead(findings: Findings) -> Markup:
    """Name of the model, verdict, and what, when and where."""
    judged = verdict(findings)
    ledger = findings.ledger
    return parts.masthead(
        findings.params.tracking.registered_model,
        RUN_NAMES.get(ledger.state, f"run {ledger.run_id}"),
        parts.badge(judged.title, judged.tone),
        judged.sentence,
        _facts(findings),
        findings.notes,
    )


def tiles(findings: Findings) -> Markup:
    """The key figures that are known."""
    return parts.tiles(_tiles(findings))


def _facts(findings: Findings) -> Iterator[tuple[str, str]]:
    params, ledger = findings.params, findings.ledger
    yield "Model", model_name(params, findings.value("sft", "parameters"))
    yield "Method", RECORDS[params.align.method].summary
    yield "Data", source_name(params)
    if ledger.started is not None:
        unfinished = "" if ledger.state == "completed" else f" ({ledger.state})"
        yield "Started", f"{moment(ledger.started)}{unfinished}"
    yield "Machine", machine_name(findings)
    price = params.prices
    electricity = f" and {usd(price.usd_per_kwh)} per kWh" if price.usd_per_kwh else ""
    yield (
        "Price",
        f"{usd(price.usd_per_device_hour)} per device and hour{electricity}: {price.source}, read {price.date}",
    )


def _tiles(findings: Findings) -> Iterator[tuple[str, str, str]]:
    """(name, figure, remark)"""
    yield from _aligned_tiles(findings)
    yield from _reward_tiles(findings)
    if (kl := findings.value("evaluate", "kl")) is not None:
        yield "KL to SFT", decimal(kl), "nats per reply"
    yield from _cost_tiles(findings.ledger)


def _aligned_tiles(findings: Findings) -> Iterator[tuple[str, str, str]]:
    value = findings.value
    gold_before, gold_after = value("evaluate", "gold_sft"), value("evaluate", "gold_aligned")
    if gold_before is not None and gold_after is not None:
        yield "Gold score", decimal(gold_after), f"before alignment {decimal(gold_before)}"
    if (right := value("evaluate", "right_item_rate")) is not None:
        before = value("evaluate", "right_item_rate_sft")
        yield ("Right item", percent(right), f"of the replies name it, {percent(before)} before alignment")
    for kind, judge in (("gold", "gold score"), ("reward", findings.params.reward_name)):
        if (rate := value("evaluate", f"win_rate_{kind}")) is not None:
            span = (
                f"{percent(value('evaluate', f'win_rate_{kind}_low'))} to "
                f"{percent(value('evaluate', f'win_rate_{kind}_high'))}"
            )
            yield "Wins over SFT", percent(rate), f"{judge}, {span}"
            break


def _reward_tiles(findings: Findings) -> Iterator[tuple[str, str, str]]:
    value = findings.value
    if (accuracy := value("reward", "accuracy")) is not None:
        limit = value("reward", "bayes_accuracy")
        yield (
            "Reward accuracy",
            percent(accuracy),
            f"{percent(limit)} is possible" if limit is not None else "on held-out pairs",
        )
    if (ece := value("reward", "ece")) is not None:
        yield "Calibration error", decimal(ece), "of the reward model, 0 is best"


def _cost_tiles(ledger: Ledger) -> Iterator[tuple[str, str, str]]:
    yield "Time", duration(ledger.total_seconds) if ledger.stages else ABSENT, "sum of all stages"
    remark = (
        f"{usd(ledger.waste_usd)} wasted"
        if ledger.waste_usd > 0
        else f"{usd(ledger.saved_usd)} saved"
        if ledger.saved_usd > 0
        else "nothing wasted"
    )
    yield "Cost", usd(ledger.total_usd) if ledger.stages else ABSENT, remark
    if peak := max((stage.peak_bytes for stage in ledger.stages), default=0):
        yield ("Peak memory", memory(peak), f"in stage {max(ledger.stages, key=lambda stage: stage.peak_bytes).stage}")


def model_name(params: Params, parameters: float | None) -> str:
    """The base model in words, with its size if it is known."""
    size = f"{short(parameters)} parameters" if parameters else None
    if params.model.random is None:
        return ", ".join(part for part in (params.model.path, size) if part)
    shape = params.model.random
    return ", ".join(
        part
        for part in (f"{shape.family} shape from scratch", f"width {shape.width}", f"{shape.layers} layers", size)
        if part
    )


def source_name(params: Params) -> str:
    """The sources of the preference data."""
    source = params.data.source
    if isinstance(source, PythonSource):
        return source.path
    if isinstance(source, FileSource | HubSource):
        return f"{source.path} ({source.format})"
    return f"embedded helpdesk world, {count(source.preference_rows)} preference pairs"


def machine_name(findings: Findings) -> str:
    """The devices that the stages ran on, as recorded."""
    devices = dict.fromkeys(f"{stage.world_size} × {stage.device}" for stage in findings.ledger.stages if stage.device)
    return ", ".join(devices) or "not recorded"
