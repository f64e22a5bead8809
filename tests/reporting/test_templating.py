"""Nothing that a model wrote can become markup."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from reporting.charts import Series, legend
from reporting.parts import card, remark, table, tagged
from reporting.templating import join


def test_text_and_attributes_are_escaped() -> None:
    result = remark('<script>alert("1")</script>', title='" onclick="x')
    assert result == (
        '<span class="remark" title="&#34; onclick=&#34;x">&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;</span>'
    )


def test_markup_is_not_escaped_twice() -> None:
    assert join(tagged("b", "a & b"), " & ") == "<b>a &amp; b</b> &amp; "
    assert "<b>a &amp; b</b>" in table(["x"], [[["1 < ", tagged("b", "a & b")]]])


def test_absent_children_leave_no_trace() -> None:
    assert join(None, [], [None]) == ""
    assert card("x", None) == '<div class="card"><h3>x</h3>\n</div>\n'


def test_control_characters_are_shown_and_direction_overrides_removed() -> None:
    assert join("a\x00b\x1b\n") == "a\u2400b\u241b\n"
    assert "\ufffdevil\ufffd" in legend([Series("\u202eevil\u2066", [])])


@given(st.text(st.characters(exclude_categories=[]), max_size=60))
def test_any_text_comes_back_as_text(content: str) -> None:
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    result = tagged("p", content)
    parser.feed(result)
    parser.close()
    assert tags == ["p"]
    assert result.encode()  # lone surrogates could not be written to a file
    assert isinstance(result, Markup)
