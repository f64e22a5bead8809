"""One params file over another: `extends: base` in a recipe, and what an incomplete file lacks.

Mappings merge key by key. Everything else replaces: plain values, lists, null, and a mapping of
another `kind` (the unions of the schema, such as data.source).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EXTENDS = "extends"
"""The key by which a params file names the one it is laid over: a name beside it, or a path."""


def compose(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `base`; keys in the base's order, then what only the overlay has."""
    composed = dict(base)
    for key, value in overlay.items():
        under = base.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping) and _same_kind(under, value):
            composed[key] = compose(under, value)
        else:
            composed[key] = value
    return composed


def lacking(base: Mapping[str, Any], overlay: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """The dotted keys that `compose` takes from the base, the highest that is missing whole."""
    for key, under in base.items():
        if key not in overlay:
            yield f"{place}{key}"
            continue
        value = overlay[key]
        if isinstance(under, Mapping) and isinstance(value, Mapping) and _same_kind(under, value):
            yield from lacking(under, value, f"{place}{key}.")


def _same_kind(under: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "kind" not in value or under.get("kind") == value["kind"]


def base_path(path: Path, name: str) -> Path:
    """The file that `extends: name` in the file `path` stands for."""
    return path.parent / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
