"""Names from outside that become folder names: people, stores, other tools' files."""

import re

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
