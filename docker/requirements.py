"""Prints the requirements of the named extras of pyproject.toml, one a line: the layers of packages then do not depend
on the code.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = "rlhf-ledger"


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The plain dependencies and those of `extras`, with extras that name others of the project followed."""
    lines = list(project["dependencies"])
    for extra in extras:
        for entry in project["optional-dependencies"][extra]:
            inner = re.fullmatch(rf"{PROJECT}\[(.+)\]", entry)
            lines += requirements(project, inner[1].split(",")) if inner else [entry]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    described = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(requirements(described, sys.argv[1:])) + "\n")
