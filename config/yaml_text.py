"""YAML that other programs write: dvc.yaml, dvc.lock, tables; and the size that any YAML may expand to."""

from typing import Any

import yaml

from config.errors import ParamsError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_VALUES = 100_000
"""A file of more, with every alias written out, is a mistake or an attack."""


def yaml_content(text: str | bytes) -> Any:
    """Like `yaml.safe_load`, but ten times as fast if PyYAML was built with libyaml. Raises ParamsError as
    `require_small` does.
    """
    require_small(text)
    return yaml.load(text, _LOADER)


def require_small(text: str | bytes) -> None:
    """Raise ParamsError for a text whose aliases expand to more than MOST_VALUES values: a few lines of nested aliases
    can take all memory.
    """
    if ("*" if isinstance(text, str) else b"*") not in text:  # type: ignore[operator]
        return
    try:
        root = yaml.compose(text, _LOADER)
    except (yaml.YAMLError, ValueError):
        return  # who reads it says what is wrong
    if root is not None and _expanded_size(root, {}) > MOST_VALUES:
        raise ParamsError(
            f"the aliases (*name) of this YAML expand to more than {MOST_VALUES:,} values. Write out what is meant."
        )


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Values in a node with every alias written out; endless for one that contains itself."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = (child for item in children for child in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in flat)
    return sizes[id(node)]
