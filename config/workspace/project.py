"""Which workspaces are of one project: its own folder, and those of its studies below it."""

import hashlib
import os
from pathlib import Path

STUDIES = Path(".rlhf/studies")
"""Below the project: the workspaces of its studies."""


def study_name(file: Path) -> str:
    """Name of a study and its workspace, by its path in the project: that of a file in studies/ is its stem, and files
    of one stem in several folders are several studies.
    """
    path = os.path.normpath(file)
    stem, digest = Path(path).stem, hashlib.sha256(path.encode()).hexdigest()
    return stem if path == f"studies/{stem}.yaml" else f"{stem}-{digest[:6]}"


def project_of(root: Path) -> Path:
    """The project that the workspace `root` belongs to: itself, unless a study of another one made it."""
    root, depth = root.resolve(), len(STUDIES.parts)
    parents = root.parents
    return parents[depth] if len(parents) > depth and parents[depth] / STUDIES == parents[0] else root


def workspaces_of(root: Path) -> list[Path]:
    """All workspaces of the project that `root` belongs to, its own folder first."""
    project = project_of(root)
    return [project, *sorted(path for path in (project / STUDIES).glob("*") if path.is_dir())]
