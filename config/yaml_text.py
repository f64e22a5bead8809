"""YAML that other programs write: dvc.yaml, dvc.lock, tables."""

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yaml_content(text: str | bytes) -> Any:
    """Like `yaml.safe_load`, but ten times as fast if PyYAML was built with libyaml."""
    return yaml.load(text, _LOADER)
