"""The rows of a helpdesk world, all at once."""

from typing import NamedTuple

from config.sections.data import HelpdeskSource
from training.worlds import helpdesk


class World(NamedTuple):
    sft: list[dict[str, str]]
    preference: list[dict[str, str]]
    prompts: list[dict[str, str]]


def generate(source: HelpdeskSource, seed: int) -> World:
    return World(**{use: list(rows(source, seed)) for use, rows in helpdesk.ROWS.items()})
