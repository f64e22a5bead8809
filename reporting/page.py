"""The page around the sections: head, style sheet, navigation, foot. It allows itself no script and
no request at all.
"""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from reporting.inputs import Findings
from reporting.markup import Child, element, join
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
from reporting.templating import environment

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
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: the browser refuses scripts and requests, whatever a model managed to
write.
"""


def page(findings: Findings) -> str:
    """The report as one HTML text."""
    more = (
        *(STUDENT if findings.params.distill is not None else ()),
        *(SERVED if findings.benchmarks else ()),
    )
    content = element(
        "main",
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
    )
    foot = element(
        "footer",
        "Every number here is in metrics/, plots/, runs/ and evaluation/ of the run. The costs as "
        "JSON: ",
        element("code", "rlhf report --json"),
        ".",
    )
    title = f"{findings.params.tracking.registered_model}, run {findings.ledger.run_id}"
    return document(title, masthead(findings), content, foot)


def navigation(anchors: Sequence[tuple[str, str]]) -> Markup:
    """Links to the sections, (anchor, name)."""
    return element(
        "nav",
        [element("a", shown, href=f"#{anchor}") for anchor, shown in anchors],
        aria_label="Sections",
    )


def document(title: str, *content: Child) -> str:
    """A complete page around its content, with the style sheet in it."""
    style = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    template = environment().get_template("document.html")
    parts = [join(part) for part in content]
    return template.render(title=title, policy=POLICY, style=style, content=parts) + "\n"
