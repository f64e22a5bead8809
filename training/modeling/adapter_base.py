"""The base model of an adapter's folder.

adapter_config.json names it: a hub id with its revision, an absolute path, or a path that starts with a dot and is
relative to the folder itself, so that both can be moved together. A model is one adapter on its base: one that
continues another starts as its copy and has the same base.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from config.errors import ModelError

CONFIG = "adapter_config.json"


class Base(NamedTuple):
    """A full model."""

    place: str | Path
    """A folder, or the id of a model on the hub."""
    revision: str | None


def is_adapter(place: str | Path) -> bool:
    return (Path(place) / CONFIG).is_file()


def base_of(place: str | Path, revision: str | None = None) -> Base:
    """The model at `place`, or the base of the adapter there.

    Raises ModelError for an adapter whose config is damaged, has no base, or whose base is an adapter.
    """
    if not is_adapter(place):
        return Base(place, revision)
    folder = Path(place)
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        named, revision = content["base_model_name_or_path"], content.get("revision")
    except (ValueError, KeyError, AttributeError):
        named = None
    if not isinstance(named, str) or not named:
        raise ModelError(
            f"{folder / CONFIG} is damaged or names no base. Copy the folder again, or run the stage that made it."
        )
    base = Path(os.path.normpath(folder / named)) if named.startswith(".") else named
    if is_adapter(base):
        raise ModelError(
            f"{folder} is an adapter of {base}, which is itself an adapter: the base must be a "
            f"model with weights of its own. Run the stages that made them again, {base} first."
        )
    return Base(base, revision)


def same_base(path: str | Path, other: str | Path) -> bool:
    """Whether the models at both places have the same base weights."""
    first, second = (
        (Path(base.place).resolve() if Path(base.place).exists() else base.place, base.revision)
        for base in (base_of(path), base_of(other))
    )
    return first == second


def named_base(start: str | Path, folder: Path, revision: str | None = None) -> tuple[str, str | None]:
    """The base, as named by an adapter in `folder` that starts from the model at `start`, and its revision: relative
    to the folder, unless the base is absolute or on the hub.
    """
    base, revision = base_of(start, revision)
    if isinstance(base, str) and (Path(base).is_absolute() or not Path(base).exists()):
        return base, revision
    return Path(os.path.relpath(base, folder)).as_posix(), revision
