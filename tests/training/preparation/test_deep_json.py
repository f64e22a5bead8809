import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.preparation.deep_json import _parse_iteratively, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(VALUES, st.sampled_from([None, 2]))
def test_the_iterative_parser_reads_what_the_standard_one_reads(
    value: Any, indent: int | None
) -> None:
    assert _parse_iteratively(json.dumps(value, indent=indent)) == value


@given(st.text(alphabet='[]{},:"a1 -.e'))
def test_the_iterative_parser_refuses_what_the_standard_one_refuses(text: str) -> None:
    try:
        expected = json.loads(text)
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError):
            _parse_iteratively(text)
    else:
        assert _parse_iteratively(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1 1]",
        "[1 11]",
        '{"a": 1 "b": 2}',
        "[1,]",
        '{"a": 1,}',
        "[1",
        '{"a"',
        '{"a" 1}',
        "{1: 2}",
        "1 2",
        '"a',
        "nul",
        "]",
    ],
)
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        _parse_iteratively(text)


def test_depth_is_no_limit() -> None:
    depth = 20_000
    value = parse('{"a": [' * depth + "]}" * depth)
    seen = 0
    while value:
        value = value["a"][0] if value["a"] else None
        seen += 1
    assert seen == depth
