"""Generates docs/params.md from the schema: `python -m config.document`.

Below, a node is a part of the JSON schema that pydantic makes of `Params`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.methods.registry import METHODS
from config.records import STAGES
from config.schema import Params

DOCUMENT = Path("docs/params.md")
HEADER = """\
# Every parameter

Written by `python -m config.document` from `config/schema.py` and `config/sections/`; a test
compares the two, so change those, not this page.

A `params.yaml` names every key of the sections it has: there are no defaults, because a default in
Python would change results without DVC noticing. `recipes/base.yaml` is a complete one, and the
other recipes extend it. Unknown keys, wrong types and impossible combinations are refused in one
line that names the value, the rule and the place. The file is read as YAML 1.2, as DVC reads it:
`true` and `false` are the only booleans, and `no` is text.
"""
BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
SHOWN_ONCE = {
    **dict.fromkeys(("data.sft_source", "data.prompt_source"), "as `data.source`, or null"),
    **dict.fromkeys(("data.vote_source", "retrain.safety_source"), "as `data.source` with `kind: file`, or null"),
    **dict.fromkeys((f"where.{stage}" for stage in STAGES), "any keys of `where.default`, or absent"),
}
"""All sources have the same shape, and all stages the same kind of place."""
BAR = r"\|"
WIDEST_CELL = 200
"""Characters. A longer meaning is a paragraph under the table."""
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}


def params_markdown() -> str:
    """The page: one table per section of params.yaml, in the schema's order."""
    schema = Params.model_json_schema()
    tables = _section("", schema, schema)
    return "\n".join([HEADER, *tables]).rstrip() + "\n"


def _section(
    name: str, node: dict[str, Any], schema: dict[str, Any], title: str = "", remark: str = ""
) -> Iterator[str]:
    """The table of a section, then those of the sections in it. `title` is appended to its name, `remark` to its
    description.
    """
    plain, inner = [], []
    for key, child in node["properties"].items():
        dotted = f"{name}.{key}" if name else key
        options = _options(child, schema)
        sections = [option for option in options if "properties" in option]
        if not sections:
            plain.append((key, _type(options), child.get("description") or "Names the kind of source."))
        elif shown := SHOWN_ONCE.get(dotted):
            plain.append((key, shown, child["description"]))
        elif len(sections) == 1:
            inner.append((dotted, sections[0], "", _absence(dotted, options)))
        else:
            inner += [
                (dotted, option, f" with `kind: {option['properties']['kind']['const']}`", "") for option in sections
            ]
    if plain:
        yield f"## `{name}`{title}\n" if name else "## Top level\n"
        if name:
            yield f"{' '.join(node['description'].split())}{remark}\n"
        yield "| key | value | meaning |\n|---|---|---|"
        below = {key: meaning for key, _, meaning in plain if len(meaning) > WIDEST_CELL}
        for key, value, meaning in plain:
            yield f"| `{key}` | {value} | {'see below' if key in below else meaning.replace('|', BAR)} |"
        yield "".join(f"\n`{key}`: {meaning}\n" for key, meaning in below.items())
    for arguments in inner:
        yield from _section(arguments[0], arguments[1], schema, *arguments[2:])


def _options(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a node, references followed."""
    if "$ref" in node:
        return _options(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], schema)
    alternatives = node.get("anyOf") or node.get("oneOf")
    return [option for child in alternatives for option in _options(child, schema)] if alternatives else [node]


def _absence(name: str, options: list[dict[str, Any]]) -> str:
    """How a section may be left out."""
    if name in METHODS:
        return " May be absent where `align.method` names another."
    return " Or null." if len(options) > 1 else ""


def _type(options: list[dict[str, Any]]) -> str:
    """`whole number ≥ 1, or null`."""
    return ", or ".join(_one_type(option) for option in options)


def _one_type(node: dict[str, Any]) -> str:
    if "const" in node or "enum" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    if node["type"] == "object":
        values = node.get("additionalProperties", {})
        return f"mapping of text to {_one_type(values)}"
    if node["type"] == "array":
        return f"list of {_one_type(node['items'])}"
    bounds = [f"{sign} {node[name]:.12g}" for name, sign in BOUNDS if name in node]
    pattern = ["YYYY-MM-DD"] if "pattern" in node else []
    return " ".join([TYPES[node["type"]], ", ".join([*bounds, *pattern])]).rstrip()


if __name__ == "__main__":
    DOCUMENT.write_text(params_markdown(), encoding="utf-8")
