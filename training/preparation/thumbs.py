"""Whether a rating calls a reply good or bad: by its value, never guessed.

Words say it by themselves. True and false, 1 and 0, 1 and -1 say it in the format `ratings`, which the user names, or
below a name such as `thumbs_up`; a column `label` of 0 and 1 may as well say which replies are toxic.
"""

from typing import Any

from config.terminal_text import shown
from training.preparation.cleaning import Refused

WORDS = {
    **dict.fromkeys(("up", "thumbs up", "thumb up", "good", "desirable", "like", "liked", "positive", "👍"), True),
    **dict.fromkeys(
        ("down", "thumbs down", "thumb down", "bad", "undesirable", "dislike", "disliked", "negative", "👎"), False
    ),
}
NUMBERS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "-1": False, "-1.0": False}
NAMES = ("thumbs_up", "thumb_up", "thumbs", "thumb", "desirable", "liked", "is_good", "good")
"""Columns that are true for a good reply."""


def _word(value: Any) -> str:
    return str(value).strip().lower().replace("_", " ").replace("-", " ") if isinstance(value, str) else ""


def is_good(value: Any, column: str) -> bool:
    """Raises Refused for a value that says neither good nor bad."""
    rating = WORDS.get(_word(value), NUMBERS.get(str(value).strip().lower()))
    if rating is None:
        raise Refused("not_a_rating", column, f"{shown(value)} says neither good nor bad")
    return rating


def is_certain(value: Any, column: str) -> bool:
    """Whether a value can be read as a rating without the user's word for it."""
    return _word(value) in WORDS or (column.lower() in NAMES and str(value).strip().lower() in NUMBERS)
