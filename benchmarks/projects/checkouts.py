"""This code in a folder of its own: its last commit, or the working tree as it is."""

import shutil
import subprocess
from pathlib import Path

from tasks.run.workspace import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (*PACKAGES, "inputs", ".dvc", "recipes", "data/samples")
FILES = (".dvcignore", ".gitignore", "constraints.txt", "dvc.yaml", "params.yaml", "prefect.yaml", "pyproject.toml")


def clone(folder: Path) -> Path:
    """A git clone of this checkout: the committed code, with a DVC remote of its own, so that it starts from
    nothing.
    """
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    point_remote(folder, folder / ".rlhf" / "store")
    return folder


def checkout(folder: Path) -> Path:
    """A git repository with the working tree's code as its only commit."""
    ignored = shutil.ignore_patterns("__pycache__", "config.local", "tmp", "cache")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)
    identity = ["-c", "user.name=copy", "-c", "user.email=copy@localhost"]
    identity += ["-c", "commit.gpgsign=false"]
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--quiet", "--message=start"],
    ):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)
    return folder


def point_remote(folder: Path, url: str | Path) -> None:
    """Make `url` the DVC remote of a checkout."""
    (folder / ".dvc" / "config.local").write_text(f"['remote \"local\"']\n    url = {url}\n", encoding="utf-8")
