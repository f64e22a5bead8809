"""What git says of a checkout."""

import os
import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """git's answer; empty without git, or outside of a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of(root: Path) -> str:
    """The commit of a checkout; in an image, which has no git, the one it was built from; empty where neither is."""
    return git(root, "rev-parse", "HEAD") or os.environ.get("RLHF_COMMIT", "")
