"""The parameters of the run, as a file that repeats it."""

from markupsafe import Markup

from config.load import dump
from reporting.inputs import Findings
from reporting.parts import details, section, tagged


def parameters_section(findings: Findings) -> Markup:
    """All of params.yaml, folded."""
    lead = "The complete params.yaml: with the same data and code it gives the same model."
    return section("parameters", "Parameters", lead, details("Show params.yaml", tagged("pre", dump(findings.params))))
