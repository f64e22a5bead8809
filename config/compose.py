"""Merges params: `extends: base` in a recipe, `--set`, and filling an incomplete file.

Mappings merge key by key. Everything else replaces: plain values, lists, null, and a mapping of another `kind` (the
unions of the schema, such as data.source).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from config.errors import ParamsError
from config.terminal_text import shown
from config.yaml_text import require_small

EXTENDS = "extends"
"""Key of a params file that names its base: a name beside it, or a path."""
RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Every complete recipe; `base` holds what they share."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "base")


def compose(base: Mapping[str, Any], overlay: Mapping[str, Any], sets: Sequence[str] = ()) -> dict[str, Any]:
    """`overlay` over `base`, then each `section.key=value` of `sets`, whose values are read as YAML and replace; keys
    in the base's order, then what is new.

    A key that is not in the schema is refused later, by `config.load.validate`. Raises ParamsError for an assignment
    that is none.
    """
    composed = dict(base)
    for key, value in overlay.items():
        under = base.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping) and _same_kind(under, value):
            composed[key] = compose(under, value)
        else:
            composed[key] = value
    for assignment in sets:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted.strip():
            raise ParamsError(
                f"--set {shown(assignment)} is not of the form section.key=value, for example --set sft.epochs=2."
            )
        composed = _set(composed, dotted.strip().split("."), _value(text), assignment)
    return composed


def parse_yaml(text: str, pure: bool = False) -> Any:
    """Read YAML 1.2, as DVC does: `no` is text, `010` is ten, `1e-5` is a number.

    `pure` is the parser written in Python. It takes ten times as long, names the right line in its errors, and accepts
    URLs in `{...}` and `[...]`.

    Raises YAMLError, ValueError for something like a date that does not exist, or ParamsError for aliases that expand
    without end.
    """
    require_small(text)
    return YAML(typ="safe", pure=pure).load(text)


def _value(text: str) -> Any:
    try:
        return parse_yaml(text, pure=True) if text else ""
    except (YAMLError, ValueError):
        return text


def _set(node: Any, keys: list[str], value: Any, assignment: str) -> dict[str, Any]:
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise ParamsError(
            f"--set {shown(assignment)} goes below a plain value. Name an existing section.key of params.yaml."
        )
    return {**node, keys[0]: value if len(keys) == 1 else _set(node.get(keys[0]), keys[1:], value, assignment)}


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested sections."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def missing_keys(base: Mapping[str, Any], overlay: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """The dotted keys that `compose` takes from the base; a missing section is one key."""
    for key, under in base.items():
        if key not in overlay:
            yield f"{place}{key}"
            continue
        value = overlay[key]
        if isinstance(under, Mapping) and isinstance(value, Mapping) and _same_kind(under, value):
            yield from missing_keys(under, value, f"{place}{key}.")


def _same_kind(under: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "kind" not in value or under.get("kind") == value["kind"]


def base_path(path: Path, name: str) -> Path:
    """The file that `extends: name` in `path` refers to: one beside it, else a recipe of the project."""
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    beside, recipe = path.parent / file, RECIPES / file
    return recipe if not beside.exists() and recipe.exists() else beside
