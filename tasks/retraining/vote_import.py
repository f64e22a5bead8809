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
    taken_in = take_in(Path.cwd(), Path(file), form, columns, question)
    text = (
        f"# {taken_in.imported} votes imported\n\n{taken_in.unchanged} of `{file}` were in "
        f"`{taken_in.votes}` already, or replaced in the same file.\n"
    )
    if taken_in.agreement is not None:
        text += f"\nAnnotators agree in {taken_in.agreement:.1%} of couples of votes on a pair.\n"
    if taken_in.refused:
        text += (
            f"\n{taken_in.refused} entries were refused: {taken_in.reasons}. "
            f"All of them are in `{taken_in.quarantine}`.\n"
        )
    create_markdown_artifact(text, key="votes", description=f"Votes taken from {file}")
