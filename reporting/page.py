"""The page around the sections: head, style sheet, navigation, foot. It allows itself no script and no request at all."""

from pathlib import Path

from reporting.inputs import Findings
from reporting.markup import Markup, element, join
from reporting.sections.costs import costs_section
from reporting.sections.curves import curves_section
from reporting.sections.data import data_section
from reporting.sections.evaluation import evaluation_section, frontier_section
from reporting.sections.overview import masthead, tiles
from reporting.sections.parameters import parameters_section
from reporting.sections.reward import reward_section
from reporting.sections.samples import samples_section

ANCHORS = (
    ("evaluation", "Did it work?"), ("cost", "Time and cost"), ("samples", "Replies"), ("frontier", "Score and KL"),
    ("reward", "Reward model"), ("curves", "Learning curves"), ("data", "Data"), ("parameters", "Parameters"),
)  # fmt: skip
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: the browser refuses scripts and requests, whatever a model managed to write."""


def page(findings: Findings) -> str:
    """The report as one HTML text."""
    style = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    name = findings.params.tracking.registered_model
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{name}, run {findings.ledger.run_id}"),
        element("style", style),
    )
    navigation = element("nav", [element("a", shown, href=f"#{anchor}") for anchor, shown in ANCHORS], aria_label="Sections")
    content = element(
        "main",
        tiles(findings),
        navigation,
        evaluation_section(findings),
        costs_section(findings),
        samples_section(findings),
        frontier_section(findings),
        reward_section(findings),
        curves_section(findings),
        data_section(findings),
        parameters_section(findings),
    )
    foot = element(
        "footer",
        "Every number here is in metrics/, plots/, runs/ and evaluation/ of the run. The costs as JSON: ",
        element("code", "rlhf report --json"),
        ".",
    )
    body = element("body", masthead(findings), content, foot)
    return "<!DOCTYPE html>\n" + join(element("html", head, body, lang="en")) + "\n"
