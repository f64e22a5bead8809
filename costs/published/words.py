"""Numbers, lengths, booleans and names as publications print them -> values, or a refusal with the
nearest known words. Nothing here guesses: what is not understood is said.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

from config.errors import CostError


class Refused(CostError):
    """A setting that can not be planned as it was printed: every word that was not understood, and
    every fact that is missing or contradicts another.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        super().__init__("; ".join(self.words))


NOT_STATED = re.compile(
    r"(not (stated|given|specified|reported|known|in)\b.*|unknown|unspecified|n/?a|none given|"
    r"\?|-)?"
)
"""What sources write where they do not say."""

TRUE = ("true", "yes", "on", "enabled", "1", "recipe default (on)", "default (on)", "with", "y")
FALSE = ("false", "no", "off", "none", "disabled", "0", "recipe default (off)", "default (off)",
         "without", "n")  # fmt: skip

SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NUMBER = r"(\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?)"


def not_stated(value: Any) -> bool:
    """Whether the source says that it does not say."""
    return value is None or (
        isinstance(value, str) and NOT_STATED.fullmatch(value.strip().lower()) is not None
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """`(nearest: a, b)` of the known words, or nothing."""
    close = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f" (nearest known: {', '.join(close)})" if close else ""


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def count(key: str, value: Any, words: str = "", binary: bool = False) -> float:
    """A positive number: 8, "2,048", "8K", "1.4T tokens". `words` is a pattern of what may stand
    around it; `binary` for lengths, whose K is 1024. Raises Refused.
    """
    value = _single(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refused([f"{key}={value!r} is not a number"])
    if isinstance(value, int | float):
        found = float(value)
    else:
        text = value.strip().lower()
        around = rf"\s*(?:{words})?\s*" if words else r"\s*"
        match = re.fullmatch(around + NUMBER + r"\s*([kmbt]?)i?" + around, text)
        if match is None:
            raise Refused([f"{key}={value!r} is not a number with a known unit"])
        scale = SCALES[match[2]]
        if binary and match[2]:
            scale = 1024.0 if match[2] == "k" else 1024.0**2 if match[2] == "m" else scale
        found = float(match[1].replace(",", "").replace("_", "")) * scale
    if not math.isfinite(found) or found <= 0:
        raise Refused([f"{key}={value!r} must be a number above 0"])
    return found


def whole(key: str, value: Any, words: str = "", binary: bool = False) -> int:
    """A positive whole number. Raises Refused."""
    found = count(key, value, words, binary)
    if found != int(found):
        raise Refused([f"{key}={value!r} must be a whole number"])
    return int(found)


def truth(key: str, value: Any) -> bool:
    """A boolean in the words of sources. Raises Refused."""
    value = _single(value)
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise Refused([f"{key}={value!r} is neither true nor false{nearest(text, (*TRUE, *FALSE))}"])


def text_of(value: Any) -> str:
    """A printed value as one line of text; the elements of a list side by side."""
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)
