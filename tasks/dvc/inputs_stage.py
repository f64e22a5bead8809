"""The DVC stage `inputs`, in inputs/dvc.yaml: it depends on the files that params.yaml names, and writes their
digests, on which the other stages depend.

dvc.yaml cannot name a path that params.yaml sets and that may not exist. So this file is rewritten from the params, by
a run and by the stage itself: its deps are the named files, or the folder of one that is not there yet. What DVC
cannot depend on is looked at each time.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from config.atomic_file import write_atomically
from config.inputs import (
    DATA_DIGESTS,
    JUDGE_DIGESTS,
    MODEL_DIGESTS,
    REWARD_DIGESTS,
    STUDENT_DIGESTS,
    named_paths,
    write_digests,
)
from config.load import load
from config.schema import Params
from tasks.dvc.status import repo_about

STAGE = "inputs"
PIPELINE = Path("inputs/dvc.yaml")
HEAD = "# What params.yaml names outside of the project. Written by a run from the params it used.\n"


def write_pipeline(root: Path, params: Params) -> None:
    """Write inputs/dvc.yaml below `root` for these params, if it differs."""
    places = {path: _place(root, path) for path in named_paths(root, params)}
    watched = _within_reach(root, {at for at in places.values() if at})
    everything = watched.issuperset(places.values())
    content = {"stages": {STAGE: definition(sorted(watched), always_changed=not everything)}}
    text = HEAD + yaml.safe_dump(content, sort_keys=False)
    target = root / PIPELINE
    if not target.exists() or target.read_text("utf-8") != text:
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, text)


def _place(root: Path, path: str) -> str | None:
    """Path for DVC to watch for a named file: the file, or the folder it will be in; None without a folder."""
    return next((at for at in (path, str(Path(path).parent)) if (root / at).exists()), None)


def definition(watched: list[str], *, always_changed: bool) -> dict[str, Any]:
    """The stage with its deps; `always_changed` if they are incomplete."""
    return {
        "desc": "Digests of the data files and the models that params.yaml names.",
        "cmd": "python -m tasks.dvc.inputs_stage",
        "wdir": "..",
        **({"deps": watched} if watched else {}),
        **({"always_changed": True} if always_changed else {}),
        "params": ["model", "data", "reward", "distill", "evaluate.judge"],
        "outs": [{str(path): {"cache": False, "persist": True}} for path in OUTS],
    }


OUTS = (DATA_DIGESTS, MODEL_DIGESTS, REWARD_DIGESTS, STUDENT_DIGESTS, JUDGE_DIGESTS)


def _within_reach(root: Path, places: set[str]) -> set[str]:
    """Paths that DVC can depend on: not ignored, and not outputs of the pipeline, which would depend on itself. Raises
    EnvironmentFault if DVC cannot tell.
    """
    if not places:
        return set()
    with repo_about(root, STAGE) as repo:
        makes = [Path(out.fs_path) for stage in repo.index.stages for out in stage.outs if stage.name != STAGE]
        return {at for at in places if _can_be_watched(repo, makes, root, Path(os.path.normpath(root.resolve() / at)))}


def _can_be_watched(repo: Any, makes: Sequence[Path], root: Path, place: Path) -> bool:
    if any(place.is_relative_to(out) or out.is_relative_to(place) for out in makes):
        return False
    if not place.is_relative_to(root.resolve()):
        return True
    return not repo.dvcignore.is_ignored(repo.fs, str(place), ignore_subrepos=False)


if __name__ == "__main__":
    params = load(Path("params.yaml"))
    write_digests(Path(), params)
    write_pipeline(Path(), params)
