"""Votes of other tools, on the Prefect side."""

from collections.abc import Mapping
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from labelling.intake import take_in


@task(name="import-votes", cache_policy=NO_CACHE, persist_result=False)
def import_votes(file: str, form: str, columns: Mapping[str, str], question: str | None) -> None:
    """Append the votes of an export, and show what came of it. Raises DataError or ParamsError as
    `labelling.intake.take_in` does.
    """
    found = take_in(Path.cwd(), Path(file), form, columns, question)
    text = (
        f"# {found.imported} votes imported\n\n{found.unchanged} of `{file}` were in "
        f"`{found.votes}` already, or replaced in the same file.\n"
    )
    if found.agreement is not None:
        text += f"\nAnnotators agree in {found.agreement:.1%} of couples of votes on a pair.\n"
    if found.refused:
        text += (
            f"\n{found.refused} entries were refused: {found.reasons}. "
            f"All of them are in `{found.quarantine}`.\n"
        )
    create_markdown_artifact(text, key="votes", description=f"Votes taken from {file}")
