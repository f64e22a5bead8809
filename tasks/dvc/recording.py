"""Having DVC record what a stage made: the same as `dvc repro` does after the stage's command."""

from contextlib import chdir  # where DVC looks for dvc.yaml when it uses its run cache
from pathlib import Path
from typing import Any

import yaml

from config.atomic_file import write_atomically
from config.differences import differences, in_a_line, sections_of
from config.errors import EnvironmentFault, ParamsError
from config.schema import Params
from tasks.dvc.lock_digests import dvc_stage, plain
from tasks.dvc.status import repo_about, yaml_of

PARAMS = "params.yaml"


def record_outputs(root: Path, stage: str, params: Params) -> None:
    """Write the digests of inputs, params and outputs of `stage` into dvc.lock, and the outputs into DVC's cache.

    Raises EnvironmentFault where DVC cannot keep them, ParamsError where params.yaml is not `params` any more: DVC
    would record values that did not make the outputs. Nothing is recorded then.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import lock_repo

    with chdir(root), repo_about(root, stage) as repo, lock_repo(repo):
        entry = dvc_stage(repo, root, stage)
        try:
            entry.save(run_cache=False)
            _require_params(entry, stage, params)
            for out in entry.outs:
                out.commit()
        except DvcException as error:
            raise EnvironmentFault(
                f"{stage} is done, but DVC could not keep its outputs: {' '.join(str(error).split())}."
            ) from None
        write_entry(root / "dvc.lock", entry)


def _require_params(entry: Any, stage: str, params: Params) -> None:
    """DVC reads params.yaml again when the process has ended."""
    from dvc.dependency.param import ParamsDependency

    for dep in entry.deps:
        if isinstance(dep, ParamsDependency) and Path(dep.fs_path).name == PARAMS:
            recorded = dep.hash_info.value
            if changed := differences(sections_of(params, list(recorded)), recorded):
                raise ParamsError(
                    f"params.yaml changed while DVC was recording {stage}: {in_a_line(changed)}. "
                    "Nothing is recorded. Put the old value back and run again: its outputs are kept."
                )


def write_entry(lock: Path, entry: Any) -> None:
    """Put the entry of a stage into a lock file, which DVC itself would write in place: half of it would stay where
    the process is killed.
    """
    from dvc.stage.serialize import to_lockfile

    put_entry(lock, plain(to_lockfile(entry)))


def put_entry(lock: Path, entries: dict[str, Any]) -> None:
    """Put entries, by DVC's names of the stages, into a lock file."""
    content = yaml_of(lock) or {"schema": "2.0"}
    content["stages"] = {**content.get("stages", {}), **entries}
    write_atomically(lock, yaml.safe_dump(content, sort_keys=False))


def require_inputs(root: Path, stage: str) -> None:
    """Raise EnvironmentFault if an input of `stage` is missing."""
    with repo_about(root, stage) as repo:
        if missing := [dep.def_path for dep in dvc_stage(repo, root, stage).deps if not dep.exists]:
            raise EnvironmentFault(
                f"{stage} needs {missing[0]}, which does not exist. Run the stage that makes it: rlhf run does all of "
                "them in order."
            )


def command_of(root: Path, stage: str) -> str:
    """What dvc.yaml runs for `stage`."""
    with repo_about(root, stage) as repo:
        return str(dvc_stage(repo, root, stage).cmd)
