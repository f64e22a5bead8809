"""The parameters of the run, as the file that repeats it."""

from markupsafe import Markup

from config.load import dump
from reporting.inputs import Findings
from reporting.markup import element
from reporting.parts import section


def parameters_section(findings: Findings) -> Markup:
    """The whole params.yaml, folded."""
    lead = "The complete params.yaml: with the same data and code it gives the same model."
    return section(
        "parameters",
        "Parameters",
        lead,
        element(
            "details", element("summary", "Show params.yaml"), element("pre", dump(findings.params))
        ),
    )
