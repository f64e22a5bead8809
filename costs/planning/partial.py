"""A params file of which only one stage is to be planned may leave the rest out: what is missing
comes from recipes/base.yaml.

Only plans are made from such a file; a run needs every parameter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.compose import compose, lacking
from config.errors import ParamsError
from config.load import read, validate
from config.schema import Params

BASE = Path(__file__).parents[2] / "recipes" / "base.yaml"


def completed(
    path: Path, overrides: list[str], stages: tuple[str, ...]
) -> tuple[Params, tuple[str, ...]]:
    """Params of a file, and what was filled in. Without `stages` the file must be complete.

    Raises ParamsError as config.load does, and where a named stage's own section is missing.
    """
    content = compose(read(path), {}, overrides)
    if not stages:
        return validate(content, str(path)), ()
    for stage in stages:
        if stage != "data" and stage not in content:
            raise ParamsError(
                f"{path} has no section {stage}, so --stage {stage} has nothing to plan. Add the "
                "section."
            )
    base = read(BASE)
    filled = list(lacking(base, content))
    whole = compose(base, content)
    _fit_model(whole, content)
    note = f"not in {path.name}, taken from recipes/base.yaml: {', '.join(filled)}"
    return validate(whole, str(path)), (note,) if filled else ()


def _fit_model(whole: dict[str, Any], content: Mapping[str, Any]) -> None:
    """A named model is not also a random one, and the context holds what the file's own stages ask
    for.
    """
    given = content.get("model") or {}
    if given.get("path") is not None and "random" not in given:
        whole["model"]["random"] = None
    if given.get("random") is not None and "path" not in given:
        whole["model"]["path"] = None
    if "context_length" not in given:
        lengths = [(content.get(stage) or {}).get("max_length") for stage in ("sft", "reward")]
        whole["model"]["context_length"] = max(
            [whole["model"]["context_length"], *(n for n in lengths if isinstance(n, int))]
        )
