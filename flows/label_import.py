"""The flow `label-import`: votes from another tool into the votes file."""

from typing import Literal

from prefect import flow

from tasks.retraining.vote_import import import_votes


@flow(name="label-import", persist_result=False)
def label_import(
    file: str,
    form: Literal["label-studio", "argilla"],
    columns: dict[str, str] | None = None,
    question: str | None = None,
) -> None:
    """Take human votes from an export of Label Studio or Argilla.

    Args:
        file: The exported JSON file, relative to the project's folder, or absolute.
        form: The tool that wrote it.
        columns: Our column (prompt, response1 or response2) -> the export's field, where it is not
            found by itself.
        question: The question that asks for the preference, if several could be it.
    """
    import_votes(file, form, columns or {}, question)
