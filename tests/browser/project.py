"""A checkout of the project with all that `rlhf up` starts, as a new user has it after a minute."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from config.ports import free_port
from tests.support.stage_server import FORKING, HOOK

PATIENCE_SECONDS = 1800.0
"""For a run of any recipe that --recipe may name."""
RECIPE = "recipes/pictured.yaml"


class Project(NamedTuple):
    root: Path
    pages: dict[str, str]
    """What `rlhf up` says where to look: Prefect, MLflow, and each form by its deployment."""
    key: str
    """What Prefect's pages ask for."""

    def rlhf(self, *arguments: str) -> str:
        return rlhf(self.root, *arguments)

    def run(self, *arguments: str) -> dict[str, Any]:
        """A run of the whole pipeline, as `rlhf run --json` tells it."""
        return dict(json.loads(self.rlhf("run", "--yes", "--json", *arguments)))


def rlhf(root: Path, *arguments: str) -> str:
    """What the command printed; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=root,
        env={**os.environ, **FORKING, "PYTHONPATH": f"{HOOK}:{root}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def project(root: Path, recipe: Path) -> Iterator[Project]:
    """The checkout `root` with its forms prefilled from `recipe`, its servers up; down again at the end."""
    shutil.copyfile(recipe, root / RECIPE)
    shutil.copyfile(recipe, root / "params.yaml")
    file = root / "prefect.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("recipes/demo.yaml", RECIPE), encoding="utf-8")
    try:
        said = rlhf(root, "up", "--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
        key = re.search(r"^Key +(\S+)", said, re.MULTILINE)
        assert key is not None, said
        yield Project(root, _pages(said), key[1])
    finally:
        rlhf(root, "down")


def _pages(said: str) -> dict[str, str]:
    pages = dict(re.findall(r"^(Prefect|MLflow) +(\S+)", said, re.MULTILINE))
    return pages | {name: url for url, name in re.findall(r"^Form +(\S+) +\(([\w/-]+)", said, re.MULTILINE)}
