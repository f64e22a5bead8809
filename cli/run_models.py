"""Puts the params, data and models of a run into a folder for a command that needs them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError

if TYPE_CHECKING:
    from config.schema import Params

CHAMPION = "champion"


@contextmanager
def models_of(root: Path, run: str | None, command: str) -> Iterator[tuple[Path, "Params"]]:
    """The folder with the params, data and models of a run, and its params. What a run made is looked up by digest in
    DVC's cache or remote, whatever is in place now. None is what is in place; `command` names the folder that is there
    meanwhile.

    Raises UserError for a run that is not there, ModelError if its models were deleted.
    """
    from config.load import load
    from config.workspace.kept import kept_params
    from tasks.champions.files import check_champion, gathered

    if run is None:
        yield root, load(root / "params.yaml")
        return
    run_id = run_id_of(root, run)
    if run == CHAMPION:
        yield check_champion(root, run_id), kept_params(root, run_id)
    else:
        with gathered(root, run_id, root / ".rlhf" / f"{command}-{os.getpid()}") as folder:
            yield folder, kept_params(root, run_id)


def run_id_of(root: Path, run: str) -> str:
    """The id of a run that is named by id, `last`, `last-1` ... or `champion`. Raises UserError."""
    from config.workspace.champions import read_record
    from reporting.runs_named import resolve_one

    if run != CHAMPION:
        return resolve_one(root, run)
    champion = read_record(root).champion
    if champion is None:
        raise UserError("there is no champion yet: rlhf promote names one. Or name a run.")
    return champion.run_id
