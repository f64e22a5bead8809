"""Text of others on a terminal: what a data file, a model or a server says must not move the cursor, set the title or
write to the clipboard.
"""

import re
from reprlib import Repr
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and marks that turn the direction of text or have no width."""


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 40


def shown(value: Any) -> str:
    """A value of any size as part of a message: as in Python's source, without its middle if that is long."""
    return _REPR.repr(value)


def visible(text: str) -> str:
    r"""The text with such characters written out, as in \x1b."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
