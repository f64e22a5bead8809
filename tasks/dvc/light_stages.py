"""The stages of DVC that a run does in its own process, since they take no time: `inputs` and
`key_metrics`. DVC is told, so that `dvc status` has nothing to say after a run.
"""

import logging
from pathlib import Path

from config.errors import EnvironmentFault
from config.schema import Params
from reporting.key_metrics import write_key_metrics
from tasks.dvc import inputs_stage
from tasks.dvc.status import repo_about


def do_light_stages(root: Path, params: Params) -> None:
    """Bring both up to date and record them in DVC's lock files; the stages before them are done.

    Where another process holds DVC's files, or a stage left no metrics, they stay unrecorded: `dvc
    repro` then does them.
    """
    try:
        for path in params.data.local_paths().values():  # votes may come later: where is watched
            (root / path).parent.mkdir(parents=True, exist_ok=True)
        inputs_stage.write_pipeline(root, params)
        write_key_metrics(root, params.align.method)
        _record(root, inputs_stage.PIPELINE, inputs_stage.STAGE)
        _record(root, Path("dvc.yaml"), "key_metrics")
    except (EnvironmentFault, OSError):
        return


def _record(root: Path, file: Path, name: str) -> None:
    """Write what DVC finds of the stage's inputs, params and outputs into its lock file."""
    with repo_about(root, name) as repo:
        from dvc.dvcfile import load_file
        from dvc.repo import lock_repo

        logging.getLogger("dvc").setLevel(logging.ERROR)  # it tells of each file that it writes
        with lock_repo(repo):
            stage = load_file(repo, str((root / file).resolve())).stages[name]
            if stage.status():
                stage.save()
                stage.dump(update_pipeline=False)
