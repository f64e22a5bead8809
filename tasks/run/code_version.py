"""The version of the code: two containers run the same stage only if it is equal."""

import hashlib
from pathlib import Path

PACKAGES = ("config", "costs", "flows", "labelling", "reporting", "serving", "tasks", "tracking", "training", "cli")
FILES = ("dvc.yaml", "constraints.txt")
HOME = Path(__file__).parents[2]
"""Where the code that runs here lies: a checkout, or the folder of an image."""


def code_digest(home: Path = HOME) -> str:
    """Digest (12 hex digits) of the modules, of dvc.yaml and of the versions of the packages."""
    digest = hashlib.sha256()
    modules = [path for package in PACKAGES for path in sorted((home / package).rglob("*.py"))]
    for path in [*modules, *(home / name for name in FILES)]:
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
