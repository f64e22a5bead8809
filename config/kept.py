"""The params that a run was made with, read from the run's own copy."""

from pathlib import Path

from config.compose import compose
from config.errors import ParamsError
from config.load import load, override, read, validate
from config.records import kept_folder
from config.schema import Params


def kept_params(root: Path, run_id: str, overrides: list[str] | None = None) -> Params:
    """The params of a past run, after `section.key=value` overrides. What the schema has gained
    since is taken from the project's params.yaml: the run knew nothing of it.

    Raises ParamsError if the copy is missing or damaged, or names what the schema does not have any
    more.
    """
    path = kept_folder(root, run_id) / "params.yaml"
    try:
        return load(path, overrides)
    except ParamsError:
        if not path.exists():
            raise
        try:
            return validate(
                override(compose(read(root / "params.yaml"), read(path)), overrides or []),
                str(path),
            )
        except ParamsError:
            pass
        raise  # what is wrong with the copy itself
