"""Reads the pages as a person does: figures by their names, numbers from their words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "br")
HEADINGS = ("h3", "summary")
UNITS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0, "%": 0.01,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "×": 1.0,
}  # fmt: skip
SPAN = r"\d+ (?:d|h|min) \d+ (?:h|min|s)(?![\w/])"
PLAIN = r"[+−-]?\$?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?(?:%|×| ?(?:[KMGT]iB|ms|min|[sdhkMBT])(?![\w]))?"
NUMBER = re.compile(rf"{SPAN}|(?<![\w.]){PLAIN}")


@dataclass
class Shown:
    """A figure on a page."""

    words: str = ""
    styles: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def places(self) -> list[float]:
        """Positions and widths of what is drawn, as fractions."""
        return [float(result) / 100 for style in self.styles
                for result in re.findall(r"(?:left|width):([\d.]+)%", style)]  # fmt: skip


class Page(HTMLParser):
    """Elements, texts, figures and badges of a page; refuses one whose tags do not nest."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.figures: dict[tuple[str, str, str], Shown] = {}
        """(section, title of a bar's card, name) -> the figure"""
        self.badges: list[Shown] = []
        self._open: list[tuple[str, list[Shown]]] = []
        self._section = self._heading = ""
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in VOID:
            return
        if tag == "section":
            self._section = attributes["id"] or ""
        if tag in ("section", *HEADINGS):
            self._heading = ""
        shown = list(self._open[-1][1]) if self._open else []
        if (name := attributes.get("data-figure")) is not None:
            key = (self._section, self._heading if tag == "li" else "", name)
            assert key not in self.figures, key
            shown.append(self.figures.setdefault(key, Shown()))
        if (attributes.get("class") or "").startswith("badge"):
            self.badges.append(Shown())
            shown.append(self.badges[-1])
        for item in shown:
            item.styles += [attributes["style"] or ""] if "style" in attributes else []
            item.classes += [attributes["class"] or ""] if "class" in attributes else []
        self._open.append((tag, shown))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1][0] in HEADINGS:
            self._heading += data
        for shown in self._open[-1][1] if self._open and data.strip() else ():
            shown.words = f"{shown.words} {data.strip()}".strip()

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def numbers(words: str) -> list[tuple[float, float]]:
    """(value, half of its last digit) of each number in a text."""
    return [_number(result) for result in NUMBER.findall(words.replace("<$", "$"))]


def _number(text: str) -> tuple[float, float]:
    if re.fullmatch(SPAN, text):
        large, unit, small, lower = text.split()
        value = int(large) * UNITS[unit] + int(small) * UNITS[lower]
        # a whole number of the smaller unit, the rest of which is left out
        return value + UNITS[lower] / 2, UNITS[lower] / 2 + 0.5
    match = re.fullmatch(r"([+−-]?)\$?([\d,]+)(\.\d+)?(e[−-]?\d+)?\s*(\S*)", text)
    assert match, text
    sign, whole, decimals, power, unit = match.groups()
    scale = UNITS[unit] * 10.0 ** int((power or "e0")[1:].replace("−", "-"))
    value = float(whole.replace(",", "") + (decimals or ""))
    slack = 0.5 * 10.0 ** -(len(decimals or ".") - 1)
    return (-1 if sign in ("−", "-") else 1) * value * scale, slack * scale


def says(words: str, expected: list[float | None]) -> bool:
    """Whether the numbers in a text are the expected ones, rounded; missing ones are a dash."""
    result, wanted = numbers(words), [value for value in expected if value is not None]
    if len(result) != len(wanted) or words.count("–") < len(expected) - len(wanted):
        return False
    return all(
        abs(value - want) <= slack * 1.000001 + 1e-12 * abs(want)
        for (value, slack), want in zip(result, wanted, strict=True)
    )
