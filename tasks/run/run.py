"""One pipeline run in a workspace: its name, its params, its lock and its rows in runs/pipeline.jsonl.

runs/pipeline.jsonl               a row when the run began, when each stage was done, when it ended
runs/pipeline/<run_id>/           params.yaml, dvc.lock, metrics, sample replies and report of the
                                  run, kept when a later run replaces them
.rlhf/run.lock                    held while a run is running: one workspace, one run
"""

import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from config.atomic_file import keep_copy, write_atomically
from config.differences import Difference, differences
from config.dvc_stages import dvc_name
from config.inputs import write_digests
from config.load import load, read, says, write
from config.records import PipelineRow, kept_folder
from config.schema import Params
from config.workspace.kept import completed_stages
from config.workspace.rows import add_pipeline_row, last_sign_of_life, pipeline_rows
from config.yaml_text import yaml_content

MOST_NAME_CHARS = 60
STUDY = "study:"
"""Begins the tag of a study's runs, which ends with its name."""
STATE_FOLDER = ".rlhf"
"""Below the project: servers, databases and locks of the orchestrator."""


@dataclass(frozen=True)
class Run:
    root: Path
    run_id: str
    params: Params

    @property
    def folder(self) -> Path:
        """Where the run's own copies are kept."""
        return kept_folder(self.root, self.run_id)

    def record(self, event: str, **fields: Any) -> None:
        """Append a row on this run to runs/pipeline.jsonl."""
        row = PipelineRow.model_validate({"time": time.time(), "run_id": self.run_id, "event": event, **fields})
        add_pipeline_row(self.root, row)


def new_run_id(name: str | None) -> str:
    """Time and the name that Prefect or somebody in its form gave the run; other signs than those of a file's name
    become hyphens.
    """
    words = re.sub(r"[^\w.-]+", "-", name or "").strip("-.")[:MOST_NAME_CHARS]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words or 'flow'}"


def begin_run(root: Path, run_id: str, params: Params, detail: dict[str, Any]) -> Run:
    """Write params.yaml and the digests of what it names outside of the project, and record the start."""
    run = Run(root, run_id, params)
    write(params, root / "params.yaml")
    write_digests(root, params)
    run.folder.mkdir(parents=True, exist_ok=True)
    write(params, run.folder / "params.yaml")
    run.record("start", detail=detail)
    return run


def keep_edits(root: Path, params: Params) -> Path | None:
    """Copy params.yaml if a run of `params` will replace it, and neither a run nor the last commit has kept what it
    holds: it was written by hand, perhaps while the run was starting. Returns the copy, None if none was needed.
    Raises OSError.
    """
    path = root / "params.yaml"
    if not path.exists() or says(path, params):
        return None
    content = path.read_bytes()
    by_runs = kept_folder(root, "any").parent.glob("*/params.yaml")
    if any(copy.read_bytes() == content for copy in by_runs) or _committed(root) == content:
        return None
    return keep_copy(path)


def _committed(root: Path) -> bytes | None:
    """params.yaml as the last commit has it; None without git, or outside of a repository."""
    command = ["git", "show", "HEAD:./params.yaml"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def put_params_back(run: Run, before: bytes | None) -> list[Difference]:
    """Give params.yaml back what it held `before` a run that did not get past its data: what it asked for shall not
    stick in later runs.

    Returns what that undoes; nothing is done once the data stage has passed, or if somebody has edited the file since.
    """
    path = run.root / "params.yaml"
    rows = pipeline_rows(run.root)
    passed = any(row.run_id == run.run_id and row.event == "stage" for row in rows)
    if before is None or passed or path.read_bytes() == before or load(path) != run.params:
        return []
    write_atomically(path, before)
    return differences(read(path), run.params.model_dump(mode="json"))


def end_left_open(root: Path) -> None:
    """Write the end of runs that were killed: the time of their last row. Whoever holds the workspace knows that none
    of them is alive.
    """
    rows = pipeline_rows(root)
    ended = {row.run_id for row in rows if row.event == "end"}
    for run_id in dict.fromkeys(row.run_id for row in rows if row.run_id not in ended):
        died = last_sign_of_life(root, run_id)
        add_pipeline_row(root, PipelineRow(time=died, run_id=run_id, event="end", state="killed"))


def keep_copies(run: Run, report: Path | None = None) -> None:
    """Keep what a later run will replace, of the stages that this run completed, and its report.

    That is dvc.lock, metrics, data of the plots and sample replies; outputs of other stages in the workspace are of
    other runs. Each copy is atomic.
    """
    completed = completed_stages(run.root, run.run_id)
    outs = {path for stage in completed.values() for path in stage if not path.startswith(("data/", "models/"))}
    for source in [*([report] if report else []), *(run.root / path for path in sorted(outs))]:
        if source.is_file():
            target = run.folder / source.relative_to(run.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.new")
            shutil.copyfile(source, temporary)
            temporary.replace(target)
    _keep_lock(run, {name for stage in set(run.params.stages) - completed.keys() for name in (dvc_name(stage), stage)})


def _keep_lock(run: Run, foreign: set[str]) -> None:
    """Keep dvc.lock without the stages `foreign`, which earlier runs made."""
    lock = run.root / "dvc.lock"
    if not lock.is_file():
        return
    text = lock.read_text(encoding="utf-8")
    content = yaml_content(text)
    if foreign & content.get("stages", {}).keys():
        content["stages"] = {stage: entry for stage, entry in content["stages"].items() if stage not in foreign}
        text = yaml.safe_dump(content, sort_keys=False)
    write_atomically(run.folder / "dvc.lock", text)
