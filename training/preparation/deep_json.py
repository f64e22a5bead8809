"""JSON of any depth: conversation trees may nest deeper than the standard parser's recursion
allows.
"""

import json
import re
from typing import Any

_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]  # the standard parser's own reader of strings
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


def parse(text: str) -> Any:
    """What `json.loads` gives, at any depth.

    Raises json.JSONDecodeError, a ValueError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _parse_iteratively(text)


def _parse_iteratively(text: str) -> Any:
    """The grammar of RFC 8259 with a stack of open lists and objects in place of recursion."""
    root: list[Any] = []
    open_values: list[Any] = [root]
    keys: list[str] = []  # the pending key of every open object
    at = _skip(text, 0)
    while True:
        at = _value(text, at, open_values, keys)
        while True:
            at = _skip(text, at)
            inside, mark = open_values[-1], text[at : at + 1]
            if inside is root:
                if mark:
                    raise json.JSONDecodeError("Extra data", text, at)
                return root[0]
            if mark != ("}" if isinstance(inside, dict) else "]"):
                break
            open_values.pop()
            at += 1
        if inside:  # not the first in its list or object
            if mark != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _skip(text, at + 1)
        if isinstance(inside, dict):
            at = _key(text, at, keys)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _key(text: str, at: int, keys: list[str]) -> int:
    """Read `"key":` and make it the pending key of the innermost object."""
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
    key, at = _scan_string(text, at + 1, True)
    at = _skip(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
    keys.append(key)
    return _skip(text, at + 1)


def _value(text: str, at: int, open_values: list[Any], keys: list[str]) -> int:
    """Read one value, or open a list or object, and put it into the innermost open one."""
    mark = text[at : at + 1]
    value: Any
    if mark in ("{", "["):
        value, at = ({} if mark == "{" else []), at + 1
        _put(value, open_values[-1], keys)
        open_values.append(value)
        return at
    if mark == '"':
        value, at = _scan_string(text, at + 1, True)
    elif number := _NUMBER.match(text, at):
        value = float(number[0]) if number[1] or number[2] else int(number[0])
        at = number.end()
    else:
        word = next((word for word in _WORDS if text.startswith(word, at)), None)
        if word is None:
            raise json.JSONDecodeError("Expecting value", text, at)
        value, at = _WORDS[word], at + len(word)
    _put(value, open_values[-1], keys)
    return at


def _put(value: Any, inside: Any, keys: list[str]) -> None:
    if isinstance(inside, dict):
        inside[keys.pop()] = value
    else:
        inside.append(value)
