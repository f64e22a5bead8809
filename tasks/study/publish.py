"""Shows a study: a page, a table in the Prefect UI, and the files of its parent run in MLflow."""

from pathlib import Path

from prefect.artifacts import create_table_artifact

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from reporting.comparison.page import comparison_page
from reporting.comparison.runs import Comparison
from reporting.comparison.words import sentence
from tasks.study.runs import PAGE, RECORD, Study
from tracking.sync import log_study


def publish(root: Path, study: Study) -> str:
    """Write page and record into the study's workspace; returns the result in a sentence."""
    comparison, name = study.result(), study.name
    conclusion = sentence(comparison)
    page, record = study.place / PAGE, study.place / RECORD
    write_atomically(page, comparison_page(comparison, f"Study {name}", f"rlhf study {study.file}"))
    write_atomically(record, comparison.model_dump_json(indent=1) + "\n")
    create_table_artifact(rows(comparison), key="study", description=f"{conclusion} The page: {page}")
    try:
        log_study(study.place, study.works[0].params, name, (page, record))
    except EnvironmentFault as fault:
        study.display.say(f"warning: {fault}")
    return conclusion


def rows(comparison: Comparison) -> list[dict[str, object]]:
    """A row for each variant, for Prefect's table."""
    return [
        {
            "variant": variant.name,
            "planned $": variant.planned_usd,
            "measured $": variant.measured_usd,
            comparison.judge: variant.quality,
            "lower end": variant.difference and variant.difference.low,
            "upper end": variant.difference and variant.difference.high,
            "verdict": variant.verdict if variant.verdict != "not run" else variant.reason,
        }
        for variant in comparison.variants
    ]
