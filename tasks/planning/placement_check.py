"""Refuses stages placed where their files are not: checked when a run is planned."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.dvc_stages import defined
from config.errors import ParamsError
from config.inputs import DATA_DIGESTS, MODEL_DIGESTS, expected_files
from config.schema import Params
from config.sections.where import LOCAL


class Outside(NamedTuple):
    """A file or folder that params name outside of the project."""

    key: str
    path: str
    kind: str
    """file or folder."""
    stands: Path
    """The list of digests that stands for it in dvc.yaml."""
    instead: str
    """What another node could read."""


def require_reachable(root: Path, params: Params, stages: Sequence[str]) -> None:
    """Raise ParamsError if one of `stages`, placed on a pool, reads what is in a folder of this machine.

    An absolute path may be on a volume that is mounted there and here: the nodes of the pool check, see `on_volumes`.
    """
    pipeline = defined(root)
    for item in _outside(root, params):
        readers = [stage for stage in _readers(pipeline, item.stands, stages) if params.where.of(stage).pool != LOCAL]
        if readers and not Path(item.path).is_absolute():
            settings = " and ".join(f"where.{stage}.pool: local" for stage in readers)
            raise ParamsError(
                f"{params.where.key_and_value(readers[0], 'pool')}: {item.key}={item.path} "
                f"is a {item.kind} of this machine, and other nodes do not have it. Set {settings}, or name "
                f"{item.instead}, or an absolute path on a volume that is mounted there too."
            )


def on_volumes(root: Path, params: Params, pool: str, stages: Sequence[str]) -> dict[str, str]:
    """Key -> absolute path, of what `stages` on `pool` read from volumes that have to be mounted on its nodes."""
    pipeline = defined(root)
    return {
        item.key: item.path
        for item in _outside(root, params)
        if Path(item.path).is_absolute()
        and any(params.where.of(stage).pool == pool for stage in _readers(pipeline, item.stands, stages))
    }


def _outside(root: Path, params: Params) -> Iterator[Outside]:
    for setting, path in expected_files(root, params).items():
        yield Outside(setting, path, "file", DATA_DIGESTS, "a URL")
    model = params.model.path
    if model is not None and (model.startswith((".", "/", "~")) or (root / model).is_dir()):
        yield Outside("model.path", model, "folder", MODEL_DIGESTS, "a model of the hub")


def _readers(pipeline: Mapping[str, Any], stands: Path, stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if stands.as_posix() in pipeline.get(stage, {}).get("deps", [])]
