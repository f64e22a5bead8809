"""The console of the commands."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from config.terminal_text import visible


class Terminal(Console):
    """A console that shows control characters in what it prints, wherever they come from; its own colours stay."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
