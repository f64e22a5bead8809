"""Sample replies and tables as a page shows them."""

from reporting.parts import MOST_SIDE_BY_SIDE, table
from reporting.sections.samples import _sample
from reporting.templating import join


def test_a_conversation_is_shown_turn_by_turn_and_a_plain_prompt_as_it_is() -> None:
    turns = [
        {"role": "user", "content": "Hello <b>?"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Help me."},
    ]
    shown = join(_sample({"prompt": "user: Hello", "messages": turns, "sft": "Gladly."}))
    assert shown.count('class="speaker"') == 3
    assert shown.count('class="earlier turn"') == 2
    assert "Hello &lt;b&gt;?" in shown
    assert "user: Hello" not in shown
    plain = join(_sample({"prompt": "user: Hello", "sft": "Gladly."}))
    assert "user: Hello" in plain
    assert "speaker" not in plain


def test_each_value_of_a_table_of_many_columns_carries_its_heading() -> None:
    names = [f"column {n}" for n in range(MOST_SIDE_BY_SIDE + 1)]
    shown = join(table(names, [list("abcd")], foot=["all", "", "", "z"]))
    assert 'class="scroll many"' in shown
    assert shown.count('data-name="column 3"') == 2, "in a row and in the foot"
    few = join(table(names[:-1], [list("abc")]))
    assert 'class="scroll"' in few
