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
    """Have the outputs of `distill` in a run that makes no student: `evaluate` depends on them. Where another process
    holds DVC's files they stay unrecorded.
    """
    write_no_student(root)
    with suppress(EnvironmentFault):
        _record(root, Path("dvc.yaml"), "distill", cached=True)


def _record(root: Path, file: Path, name: str, cached: bool = False) -> None:
    """Write what DVC finds of the stage's inputs, params and outputs into its lock file; `cached` outputs go to its
    cache, from which another machine gets them.
    """
    with repo_about(root, name) as repo:
        from dvc.dvcfile import load_file
        from dvc.repo import lock_repo

        logging.getLogger("dvc").setLevel(logging.ERROR)  # it logs each file that it writes
        with lock_repo(repo):
            stage = load_file(repo, str((root / file).resolve())).stages[name]
            if status_of(stage):
                stage.save()
                for out in stage.outs if cached else ():
                    out.commit()
                write_entry((root / file).with_name("dvc.lock"), stage)
