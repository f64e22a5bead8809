"""The report of a run: its sections in order."""

from reporting.inputs import Findings
from reporting.parts import document, navigation
from reporting.sections.costs import costs_section
from reporting.sections.curves import curves_section
from reporting.sections.data import data_section
from reporting.sections.distillation import distillation_section
from reporting.sections.evaluation import evaluation_section, frontier_section
from reporting.sections.overview import masthead, tiles
from reporting.sections.parameters import parameters_section
from reporting.sections.reward import reward_section
from reporting.sections.samples import samples_section
from reporting.sections.serving import serving_section

ANCHORS = (
    ("evaluation", "Did it work?"),
    ("cost", "Time and cost"),
    ("samples", "Replies"),
    ("frontier", "Score and KL"),
    ("reward", "Reward model"),
    ("curves", "Learning curves"),
    ("data", "Data"),
    ("parameters", "Parameters"),
)
STUDENT = (("student", "Student"),)
SERVED = (("served", "Served"),)


def page(findings: Findings) -> str:
    """The report as one HTML text."""
    more = (*(STUDENT if findings.params.distill is not None else ()), *(SERVED if findings.benchmarks else ()))
    content = [
        tiles(findings),
        navigation([*ANCHORS[:1], *more, *ANCHORS[1:]]),
        evaluation_section(findings),
        distillation_section(findings),
        serving_section(findings),
        costs_section(findings),
        samples_section(findings),
        frontier_section(findings),
        reward_section(findings),
        curves_section(findings),
        data_section(findings),
        parameters_section(findings),
    ]
    foot = "Every number here is in metrics/, plots/, runs/ and evaluation/ of the run. The costs as JSON: "
    title = f"{findings.params.tracking.registered_model}, run {findings.ledger.run_id}"
    return document(title, masthead(findings), content, ["rlhf report --json"], foot)
