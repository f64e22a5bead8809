"""Nothing that a model wrote can become markup."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from reporting.markup import element, join, text


def test_text_and_attributes_are_escaped() -> None:
    made = element("p", '<script>alert("1")</script>', title='" onclick="x')
    assert (
        made
        == '<p title="&#34; onclick=&#34;x">&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;</p>'
    )


def test_markup_is_not_escaped_twice() -> None:
    assert join(element("b", "a & b"), " & ") == "<b>a &amp; b</b> &amp; "


def test_absent_children_and_attributes_leave_no_trace() -> None:
    assert element("p", None, [], class_=None, hidden=False) == "<p></p>"
    assert element("circle", r=2.0, stroke_width=0.5) == '<circle r="2" stroke-width="0.5"/>'
    assert element("rect", element("title", "x")) == "<rect><title>x</title></rect>"


def test_control_characters_are_shown_and_direction_overrides_removed() -> None:
    assert text("a\x00b\x1b\n") == "a\u2400b\u241b\n"
    assert text("\u202eevil\u2066\ud800\udfff") == "\ufffdevil\ufffd\ufffd\ufffd"


@given(st.text(st.characters(exclude_categories=[]), max_size=60))
def test_any_text_comes_back_as_text(content: str) -> None:
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append(tag)  # type: ignore[method-assign]
    made = element("p", content, title=content)
    parser.feed(made)
    parser.close()
    assert found == ["p"]
    assert made.encode()  # lone surrogates could not be written to a file
    assert isinstance(made, Markup)
