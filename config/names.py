"""Names from outside that become folder names: people, stores, other tools' files."""

import re
from pathlib import Path

from config.errors import EnvironmentFault
from config.terminal_text import shown

INNER_NAME = re.compile(r"\w[\w.-]*")


def inner_name(name: str, what: str) -> str:
    """`name`, checked to stay inside the folder it is appended to.

    Raises EnvironmentFault otherwise: removing that path could delete other files.
    """
    if not isinstance(name, str) or not INNER_NAME.fullmatch(name):
        raise EnvironmentFault(
            f"{what} {shown(name)} cannot name a folder: letters, digits, _ - and . can, after the first character."
        )
    return name


def inside(name: str, who: str) -> str:
    """`name`, a path received from elsewhere. Raises EnvironmentFault if it leads out of the folder that it is for."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise EnvironmentFault(
            f"{who} names {name}, which is outside of the project: it was not made by this program."
        )
    return name
