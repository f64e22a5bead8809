"""The DVC stages that a run executes in its own process, as they take no time: `inputs`, `key_metrics`, and `distill`
where there is no student to make. They are recorded in DVC, so that `dvc status` is clean after a run.
"""

import logging
from contextlib import suppress
from pathlib import Path

from config.errors import EnvironmentFault
from config.schema import Params
from config.student import write_no_student
from reporting.key_metrics import write_key_metrics
from tasks.dvc import inputs_stage
from tasks.dvc.lock_digests import dvc_stages, is_copy, locked_digest, outs_by_path
from tasks.dvc.recording import write_entry
from tasks.dvc.status import repo_about, status_of


def do_light_stages(root: Path, params: Params) -> None:
    """Run both and record them in DVC's lock files; the stages before them are done.

    Where another process holds DVC's files, or a stage left no metrics, they stay unrecorded: `dvc repro` then does
    them.
    """
    try:
        for path in params.data.local_paths().values():  # votes may come later: the place to watch
            (root / path).parent.mkdir(parents=True, exist_ok=True)
        inputs_stage.write_pipeline(root, params)
        write_key_metrics(root, params.align.method)
        _record(root, inputs_stage.PIPELINE, inputs_stage.STAGE)
        _record(root, Path("dvc.yaml"), "key_metrics")
    except (EnvironmentFault, OSError):
        return


def record_no_student(root: Path) -> None:
    """Have the outputs of `distill` in a run that makes no student: `evaluate` depends on them. They replace those of
    an earlier student that DVC's cache has. Where another process holds DVC's files they stay unrecorded.

    What the stage depends on may be in the remote alone: its digests are those of dvc.lock.
    """
    with suppress(EnvironmentFault), repo_about(root, "distill") as repo:
        from dvc_data.hashfile.hash_info import HashInfo

        stages = dvc_stages(repo, root)
        if (item := stages.get("distill")) is None:
            return
        outs = outs_by_path(stages.values())
        for out in item.outs:
            if out.exists and not out.changed_checksum() and not out.changed_cache():
                out.remove()
        write_no_student(root)
        for dep in item.deps:
            if is_copy(outs, dep):
                dep.hash_info = HashInfo("md5", locked_digest(outs, dep.fs_path))
            else:
                dep.save()
        for out in item.outs:
            out.save()
            out.commit()
        write_entry(root / "dvc.lock", item)


def _record(root: Path, file: Path, name: str) -> None:
    """Write what DVC finds of the stage's inputs, params and outputs into its lock file."""
    with repo_about(root, name) as repo:
        from dvc.dvcfile import load_file
        from dvc.repo import lock_repo

        logging.getLogger("dvc").setLevel(logging.ERROR)  # it logs each file that it writes
        with lock_repo(repo):
            stage = load_file(repo, str((root / file).resolve())).stages[name]
            if status_of(stage):
                stage.save()
                write_entry((root / file).with_name("dvc.lock"), stage)
