"""One folder per stage and setting: `.rlhf/levers/stages/<stage>-<digest>`.

The digest covers what the stage reads: its sections of params.yaml, where it runs, its code, the
local files that params.yaml names, and the digests of the stages before it. Two variants that agree
in all of these share the folder, and a folder whose stage is done is never computed again.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from config.differences import sections_of
from config.dvc_stages import defined
from config.errors import EnvironmentFault
from config.inputs import digest_files, named_paths
from config.load import write
from config.locks import lock_file
from config.methods.registry import METHODS
from config.schema import Params
from config.stage_code import stage_code
from tasks.run.code_version import HOME

STUDIES = Path(".rlhf/levers")
OUTPUTS = {
    "data": ("data/prepared", "data/tokenizer", "metrics/data.json"),
    "sft": ("models/sft",),
    "reward": ("models/reward",),
    **{method: (f"models/{method}",) for method in METHODS},
    "distill": ("models/distill",),
}
"""Outputs of a stage that later stages read."""


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the folders of a project: two processes would train in the same ones. Raises
    EnvironmentFault if another one has them.
    """
    (root / STUDIES).mkdir(parents=True, exist_ok=True)
    with lock_file(root / STUDIES / "lock") as holder:
        if holder is not None:
            raise EnvironmentFault(
                f"process {holder} is comparing levers or measuring growth in this project: wait "
                "for its end, or stop it."
            )
        yield


Chain = Mapping[str, Params]
"""The params that each stage of a variant is made with."""


def upstream(chain: Chain, stage: str) -> tuple[str, ...]:
    """The stages whose outputs a stage reads."""
    if stage == "distill":
        return ("data", "sft", "reward", chain[stage].align.method)
    known = {"data": (), "sft": ("data",), "reward": ("data", "sft"), "dpo": ("data", "sft")}
    return known.get(stage, ("data", "sft", "reward"))


def stage_folder(root: Path, chain: Chain, stage: str) -> Path:
    """The folder of a stage with these settings; it may not be there yet."""
    return root / STUDIES / "stages" / f"{stage}-{digest(root, chain, stage)}"


def digest(root: Path, chain: Chain, stage: str) -> str:
    """Of all that decides what the stage makes and how it runs (12 hex digits)."""
    params = chain[stage]
    sections = [each for each in _stages()[stage]["params"] if isinstance(each, str)]
    content = {
        "params": sections_of(params, sections),
        "where": params.where.of(stage).model_dump(exclude={"pool"}),
        "code": _code(stage),
        "files": {str(path): text for path, text in digest_files(root, params).items()},
        "upstream": [digest(root, chain, each) for each in upstream(chain, stage)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@lru_cache
def _code(stage: str) -> dict[str, str]:
    return stage_code(HOME, stage)


@lru_cache(maxsize=1)
def _stages() -> dict[str, dict[str, Any]]:
    return defined(HOME)


def prepare(root: Path, chain: Chain, stage: str) -> Path:
    """Make the folder of a stage, with its params.yaml and links to what it reads."""
    folder, params = stage_folder(root, chain, stage), chain[stage]
    lay_out(root, folder, params)
    for each in upstream(chain, stage):
        link_outputs(folder, stage_folder(root, chain, each), each)
    return folder


def lay_out(root: Path, folder: Path, params: Params) -> None:
    """A folder like a project's, with params.yaml and links to the files that it names."""
    for name in ("metrics", "plots", "models", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(params, folder / "params.yaml")
    link_inputs(root, folder, params)


def link_inputs(root: Path, folder: Path, params: Params) -> None:
    """Link the local files that params.yaml names into `folder`."""
    for path in named_paths(root, params):
        _link(folder / path, root / path)


def link_outputs(folder: Path, made: Path, stage: str) -> None:
    """Link what a stage made in `made` into `folder`."""
    for output in OUTPUTS[stage]:
        _link(folder / output, made / output)


def _link(link: Path, target: Path) -> None:
    if Path(link).is_absolute() and link == target:
        return  # params.yaml names it by its absolute path
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() and not link.exists():
        link.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))


def write_lock(folder: Path, params: Params) -> None:
    """Record in dvc.lock the params that made the data of `folder`, as DVC would, so that the
    planner counts their rows.
    """
    made_with: Mapping[str, Any] = {"data": params.data.model_dump(mode="json")}
    lock = {"stages": {"data": {"params": {"params.yaml": made_with}}}}
    (folder / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
