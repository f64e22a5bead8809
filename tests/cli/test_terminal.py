"""What others write reaches a terminal as text."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from cli.terminal import Terminal
from config.terminal_text import visible

HOSTILE = "\x1b[2J\x1b]0;OWNED\x07 fine\ttab\r\u202etxt \x9b1A"


def test_control_characters_are_written_out() -> None:
    assert visible(HOSTILE) == "\\x1b[2J\\x1b]0;OWNED\\x07 fine\ttab\\r\\u202etxt \\x9b1A"
    assert visible("naïve – 日本語\n") == "naïve – 日本語\n"


@pytest.mark.parametrize("colours", [False, True])
def test_a_console_shows_them_and_keeps_its_own_colours(colours: bool) -> None:
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=colours, width=200, color_system="standard" if colours else None)
    table = Table("a")
    table.add_row(Text(HOSTILE, style="red"))
    console.print(Text(HOSTILE), table)
    printed = file.getvalue()
    assert "OWNED" in printed
    assert "\x1b]0;" not in printed
    assert "\x07" not in printed
    assert ("\x1b[31m" in printed) is colours
