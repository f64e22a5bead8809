"""Names that become folders and come from elsewhere: a person, a store, a file of somebody else."""

import re

from config.errors import EnvironmentFault

INNER_NAME = re.compile(r"\w[\w.-]*")


def inner_name(name: str, what: str) -> str:
    """`name`, which can only be a folder within the one it is appended to.

    Raises EnvironmentFault if it could lead elsewhere: what is removed there would be somebody
    else's.
    """
    if not isinstance(name, str) or not INNER_NAME.fullmatch(name):
        raise EnvironmentFault(
            f"{what} {str(name)[:80]!r} cannot name a folder: letters, digits, _ - and . can, "
            "after the first character."
        )
    return name
