"""The params that a run was made with, read from the run's own copy."""

from pathlib import Path
from typing import Any

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
                override(_filled(read(path), read(root / "params.yaml")), overrides or []),
                str(path),
            )
        except ParamsError:
            pass
        raise  # what is wrong with the copy itself


def _filled(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`own`, with the keys that only `other` has, section by section; a section of another kind
    gives nothing.
    """
    filled = dict(own)
    for key, value in other.items():
        mine = own.get(key)
        if key not in own:
            filled[key] = value
        elif (
            isinstance(mine, dict)
            and isinstance(value, dict)
            and mine.get("kind") == value.get("kind")
        ):
            filled[key] = _filled(mine, value)
    return filled
