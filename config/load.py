"""Reading params.yaml: YAML -> overrides -> Params, each mistake in one line."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from config.atomic_file import write_atomically
from config.compose import EXTENDS, base_path, compose, missing_keys, parse_yaml
from config.errors import ParamsError
from config.schema import Params
from config.terminal_text import shown

BASE = Path(__file__).parents[1] / "recipes" / "base.yaml"
YAML_1_1_BOOLEANS = dict.fromkeys(("yes", "on", "y"), "true") | dict.fromkeys(("no", "off", "n"), "false")
"""Words that are booleans in YAML 1.1 and text in YAML 1.2."""
NUMBER_IN_YAML_1_2 = re.compile(r"[-+.0-9][-+.0-9_a-fA-Fox]*")
"""Text that YAML 1.2 might read as a number; the rules of YAML 1.1 differ."""


def load(path: Path, overrides: list[str] | None = None) -> Params:
    """The validated params of a file, after `section.key=value` overrides.

    Raises ParamsError with one line for a missing or broken file, an unknown key, a wrong type or an impossible
    combination.
    """
    return validate(compose(read(path), {}, overrides or []), str(path), overrides or [])


def load_partly(path: Path, overrides: list[str], stages: tuple[str, ...]) -> tuple[Params, tuple[str, ...]]:
    """Params for planning only `stages`, with missing keys from recipes/base.yaml, and a note on what was filled in.
    Without `stages` the file must be complete.

    A run needs every parameter; only plans are made from such a file.

    Raises ParamsError as config.load does, and where a named stage's own section is missing.
    """
    content = compose(read(path), {}, overrides)
    if not stages:
        return validate(content, str(path)), ()
    for stage in stages:
        if stage != "data" and stage not in content:
            raise ParamsError(
                f"{path} has no section {stage}, so --stage {stage} has nothing to plan. Add the section."
            )
    base = read(BASE)
    filled = list(missing_keys(base, content))
    merged = compose(base, content)
    _fit_model(merged, content)
    note = f"not in {path.name}, taken from recipes/base.yaml: {', '.join(filled)}"
    return validate(merged, str(path)), (note,) if filled else ()


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, laid over the file that its `extends` names, if it names one.

    Raises ParamsError if a file is missing or broken, or files extend each other in a circle.
    """
    chain = [path]
    content = _mapping(path)
    while EXTENDS in content:
        name = content.pop(EXTENDS)
        if not isinstance(name, str) or not name:
            raise ParamsError(
                f"extends={shown(name)} in {chain[-1]}: the name of a recipe or of a params "
                "file beside it is needed, such as base."
            )
        base = base_path(chain[-1], name)
        if base.resolve() in [recipe.resolve() for recipe in chain]:
            circle = " -> ".join(recipe.name for recipe in [*chain, base])
            raise ParamsError(f"{circle} extend each other. Remove extends from one of them.")
        chain.append(base)
        content = compose(_mapping(base), content)
    return content


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(
            f"{path} does not exist. Run in the project's folder, or name a recipe with --recipe recipes/demo.yaml."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path} cannot be read: {error}. It must be a UTF-8 YAML file.") from None
    except (YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise ParamsError(
            f"{path} is not valid YAML{line}: {getattr(error, 'problem', None) or error}. Fix that line."
        ) from None
    if not isinstance(content, dict):
        raise ParamsError(
            f"{path} holds {type(content).__name__}, a mapping of sections is needed. Start from recipes/base.yaml."
        )
    return content


def _parse(text: str) -> Any:
    try:
        return parse_yaml(text)
    except (YAMLError, ValueError):
        parse_yaml(text, pure=True)  # its error names the wrong line, not the last one
        raise


def validate(content: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Params:
    """Params from a mapping; `origin` names it in messages, and `overrides` are those `section.key=value` that it came
    to hold by --set.

    Raises ParamsError with one line.
    """
    try:
        return Params.model_validate(content)
    except ValidationError as error:
        raise ParamsError(_explain(error, origin, overrides)) from None


def _explain(error: ValidationError, origin: str, overrides: Sequence[str]) -> str:
    """The first mistake in one line, and how many more there are."""
    problems = error.errors()
    # a misspelt key is also a missing one: report the misspelling
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    loc, kinds = [str(part) for part in first["loc"]], _kinds()
    place = ".".join(
        part
        for i, part in enumerate(loc)
        if not (i and part in kinds and loc[i - 1].endswith(("source", "reward", "judge")))
    )
    origin = f"in {origin}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place = f"{place}.kind"
    if any(f"{place}.".startswith(f"{override.partition('=')[0].strip()}.") for override in overrides):
        origin = "from --set"
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    match first["type"]:
        case "extra_forbidden":
            names = _known_keys(loc[:-1])
            close = difflib.get_close_matches(loc[-1], names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known there: {', '.join(names)}."
            return f"{place} is not a parameter {origin}; {hint}{more}"
        case "missing" | "union_tag_not_found":
            return f"{place} is missing {origin}; every parameter must be given, recipes/base.yaml has them all.{more}"
        case "union_tag_invalid":
            kind, known_kinds = first["ctx"]["tag"], first["ctx"]["expected_tags"]
            return f"{place}={shown(kind)} {origin}: input should be one of {known_kinds}.{more}"
        case _:
            value = first.get("input")
            note = ""
            meant = YAML_1_1_BOOLEANS.get(value.lower()) if isinstance(value, str) else None
            if first["type"].startswith("bool") and meant:
                note = f" {value} is text in YAML 1.2, which DVC reads: write {meant}."
            return f"{place}={shown(value)} {origin}: {first['msg'][0].lower()}{first['msg'][1:]}.{note}{more}"


def _kinds() -> set[str]:
    """Values of `kind` in all sections: pydantic has them in the place of a mistake."""
    sections = Params.model_json_schema()["$defs"].values()
    return {section["properties"]["kind"]["const"] for section in sections if "kind" in section.get("properties", {})}


def _known_keys(loc: list[str]) -> list[str]:
    """Field names of the section at `loc`, by walking the JSON schema."""
    schema = Params.model_json_schema()
    node: dict[str, Any] = schema
    for part in loc:
        node = _resolve(node, part, schema)
    return sorted(node.get("properties", {}))


def _resolve(node: dict[str, Any], part: str, schema: dict[str, Any]) -> dict[str, Any]:
    def follow(candidate: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in candidate:
            candidate = schema["$defs"][candidate["$ref"].rsplit("/", 1)[1]]
        return candidate

    child = node.get("properties", {}).get(part)
    if child is not None:
        child = follow(child)
        options = [follow(option) for option in child.get("anyOf", [])]
        objects = [option for option in options if option.get("properties") or option.get("oneOf")]
        return objects[0] if objects else child
    for option in node.get("oneOf", []):
        option = follow(option)
        if option["properties"]["kind"].get("const") == part:
            return option
    return node


def dump(params: Params) -> str:
    """`params` as the YAML text of a complete params.yaml."""
    return to_yaml(params.model_dump(mode="json"))


def to_yaml(content: Mapping[str, Any]) -> str:
    """A mapping as YAML text that YAML 1.1 and 1.2 parse alike."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    pass


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text.split("e")[0]:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    is_number = NUMBER_IN_YAML_1_2.fullmatch(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if is_number else None)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _text)


def write(params: Params, path: Path) -> None:
    """Write a complete params.yaml atomically. A complete file with the same values is left alone, comments included.

    DVC reads the file without what it may extend, so one that extends another is not complete.
    """
    if not says(path, params):
        write_atomically(path, dump(params))


def says(path: Path, params: Params) -> bool:
    """Whether a file is a complete params.yaml that holds `params`."""
    try:
        return EXTENDS not in _mapping(path) and load(path) == params
    except ParamsError:
        return False


def _fit_model(merged: dict[str, Any], content: Mapping[str, Any]) -> None:
    """A file that names a model overrides the base's random one, and the context is long enough for the file's own
    stages.
    """
    model = content.get("model") or {}
    if model.get("path") is not None and "random" not in model:
        merged["model"]["random"] = None
    if model.get("random") is not None and "path" not in model:
        merged["model"]["path"] = None
    if "context_length" not in model:
        lengths = [(content.get(stage) or {}).get("max_length") for stage in ("sft", "reward")]
        merged["model"]["context_length"] = max(
            [merged["model"]["context_length"], *(n for n in lengths if isinstance(n, int))]
        )
