"""Which project and which params a command works on, and how commands are typed in it."""

import sys
from pathlib import Path

from config.errors import EnvironmentFault
from config.load import load
from config.schema import Params


def project_root() -> Path:
    """The current folder, if it is a checkout of this project. Raises EnvironmentFault if it is
    not.
    """
    here = Path.cwd()
    if (here / "dvc.yaml").exists():
        return here
    above = next((folder for folder in here.parents if (folder / "dvc.yaml").exists()), None)
    place = f"cd {above} first" if above else "change to the checkout first"
    raise EnvironmentFault(f"{here} has no dvc.yaml, so it is not the project's folder: {place}.")


def chosen_params(root: Path, recipe: Path | None, overrides: list[str]) -> Params:
    """The params of `recipe`, or of the project's params.yaml, after the overrides. Raises
    ParamsError.
    """
    return load(recipe if recipe is not None else root / "params.yaml", overrides)


def this_command() -> str:
    """How to type `rlhf` here: by its path if the environment's folder is below the current one."""
    program = Path(sys.executable).with_name("rlhf")
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else "rlhf"
