"""Writes docs/tree.md: every file, and what it says of itself in its first line.

`python docs/tree.py` writes it; a test compares the two.
"""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "tree.md"
HEADER = """\
# The tree

Written by `python docs/tree.py` from the first line of every file: change that, not this page.
One job per package; imports point downward only, and between rooms as `pyproject.toml` says, which
`make lint` checks. Tests mirror the packages.

"""
SELF_EXPLAINING = {
    ".ci/run": "what has to pass before a change is kept",
    ".dockerignore": "what the images leave out",
    ".dvc/config": "the remote of data and models",
    ".dvc/plots/bars_by_model.json": "template of a plot for dvc plots",
    ".dvc/plots/histogram_by_split.json": "the same",
    "LICENSE": "Apache-2.0",
    "README.md": "what it is, two commands, what you see",
    "benchmarks/fault_injection/clock.c": "a clock that jumps, preloaded into a process",
    "docker/databases.sql": "the second database of the compose stack",
    "docker/pools/docker.json": "job template of the Docker work pools",
    "docker/pools/kubernetes.json": "job template of a Kubernetes work pool",
    "params.yaml": "what the newest run was asked for; at first the demo",
    "labelling/page.html": "the page on which people compare replies",
    "reporting/style.css": "the look of the report",
}
LONGEST = 110
"""Characters of a sentence; of a longer one, what stands before its first colon."""
WIDTH = 30
LEFT_OUT = ("docs/images/", "tests/", ".dvcignore", ".gitignore", ".dvc/.gitignore")


def tracked() -> list[str]:
    """The files in git's index, so `git add` a new file first. What a run leaves is not listed."""
    command = ["git", "ls-files", "--cached"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in found.splitlines() if (ROOT / path).exists())


def sentence(path: str) -> str:
    """The first sentence of a file's docstring, title or opening comment."""
    if path in SELF_EXPLAINING:
        return SELF_EXPLAINING[path]
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        words = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    elif path.endswith(".md"):
        words = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    else:
        comments = []
        for line in text.splitlines():
            if not line.startswith("#") or line.startswith("#!"):
                if comments:
                    break
                continue
            comments.append(line.lstrip("# "))
        words = " ".join(comments)
    words = " ".join(words.split())
    found = words.split(". ")[0]
    return (found if len(found) <= LONGEST else found.split(": ")[0]).rstrip(".:")


def tree() -> str:
    """The page."""
    lines, folders = [HEADER + "```text"], []
    for path in tracked():
        if path.startswith(LEFT_OUT) or path.endswith("__init__.py"):
            continue
        parts = path.split("/")
        for depth, folder in enumerate(parts[:-1]):
            if folders[: depth + 1] != parts[: depth + 1]:
                folders = parts[: depth + 1]
                room = "/".join(folders) + "/__init__.py"
                about = sentence(room) if (ROOT / room).exists() else ""
                lines.append(f"{'  ' * depth}{folder + '/':{WIDTH - 2 * depth}} {about}".rstrip())
        if len(parts) == 1:
            folders = []
        depth = len(parts) - 1
        lines.append(f"{'  ' * depth}{parts[-1]:{WIDTH - 2 * depth}} {sentence(path)}".rstrip())
    return "\n".join([*lines, "```"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(tree(), encoding="utf-8")
