"""The project and the params that a command works on, and how to type its commands."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import EnvironmentFault

if TYPE_CHECKING:
    from config.schema import Params


def project_root() -> Path:
    """The project's folder, which becomes the working directory: the current folder, or the nearest parent that has
    the pipeline. Raises EnvironmentFault if there is none.
    """
    root = enter_project()
    if root is None:
        raise EnvironmentFault(
            f"{Path.cwd()} has no dvc.yaml, so it is not the project's folder: change to the checkout first."
        )
    return root


def enter_project() -> Path | None:
    """Change to the project's folder, if this is inside one."""
    root = _around(Path.cwd())
    if root is not None:
        os.chdir(root)
    return root


def _around(folder: Path) -> Path | None:
    """The nearest parent with a pipeline; the folder `inputs` with its own dvc.yaml is part of the project."""
    return next((at for at in (folder, *folder.parents) if (at / "dvc.yaml").exists() and not _is_part(at)), None)


def _is_part(folder: Path) -> bool:
    return folder.name == "inputs" and (folder.parent / "dvc.yaml").exists()


def typed_path(text: str) -> Path:
    """A path given on the command line, relative to the project's folder. For `parser=` of an option: paths are typed
    relative to the current folder.
    """
    here = Path.cwd()
    root = _around(here)
    return Path(text if root in (None, here) else os.path.relpath(here / text, root))


def chosen_params(root: Path, recipe: Path | None, overrides: list[str]) -> "Params":
    """The params of `recipe`, or of the project's params.yaml, after the overrides. Raises ParamsError."""
    from config.load import load  # pydantic takes a while to import

    return load(recipe if recipe is not None else root / "params.yaml", overrides)


def this_command() -> str:
    """How to type `rlhf` here: by path if the virtual environment is below the current folder."""
    program = Path(sys.executable).with_name("rlhf")
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else "rlhf"
