"""What an adapter's folder stands on, down to a base with weights of its own.

adapter_config.json names the base: a hub id with its revision, an absolute path, or a path that
starts with a dot and is relative to the folder itself, so that both can be moved together. The base
may be an adapter's folder too: an adapter of the reward or ppo stage stands on that of the sft
stage, which stays on beneath it.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from config.errors import ModelError

CONFIG = "adapter_config.json"


class Lineage(NamedTuple):
    """What a model is made of: a base with weights of its own, and adapters on it, lowest first."""

    base: str | Path
    """A folder, or the id of a model on the hub."""
    revision: str | None
    adapters: tuple[Path, ...]


def is_adapter(place: str | Path) -> bool:
    return (Path(place) / CONFIG).is_file()


def lineage(place: str | Path, revision: str | None = None) -> Lineage:
    """Follow the bases of adapters down to one that is none.

    Raises ModelError for an adapter whose config is damaged, names no base, or stands on itself.
    """
    adapters: list[Path] = []
    while is_adapter(place):
        folder = Path(place)
        if folder.resolve() in {seen.resolve() for seen in adapters}:
            raise ModelError(
                f"{folder} stands on itself: fix base_model_name_or_path in {folder / CONFIG}."
            )
        adapters.insert(0, folder)
        try:
            content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            named, revision = content["base_model_name_or_path"], content.get("revision")
        except (ValueError, KeyError, AttributeError):
            named = None
        if not isinstance(named, str) or not named:
            raise ModelError(
                f"{folder / CONFIG} is damaged or names no base. Copy the folder again, or run the "
                "stage that made it."
            )
        place = Path(os.path.normpath(folder / named)) if named.startswith(".") else named
    return Lineage(place, revision, tuple(adapters))


def same_base(one: Lineage, other: Lineage) -> bool:
    """Whether both stand on the same weights."""
    places = [
        Path(found.base).resolve() if Path(found.base).exists() else found.base
        for found in (one, other)
    ]
    return places[0] == places[1] and one.revision == other.revision


def named_base(base: str | Path, folder: Path) -> str:
    """How an adapter to be in `folder` names its base: relative to the folder, unless the base is
    absolute or on the hub.
    """
    if isinstance(base, str) and (Path(base).is_absolute() or not Path(base).exists()):
        return base
    return Path(os.path.relpath(base, folder)).as_posix()
