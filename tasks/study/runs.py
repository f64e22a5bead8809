"""The runs of a study, one after another in a workspace of its own: `.rlhf/studies/NAME`, with the
project's code, its own rows and the project's DVC cache.

A variant is `rlhf run` with its params: what DVC finds unchanged since the variant before is not
made again, and a run that was stopped goes on from its checkpoint.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from config.errors import EXIT_DONE, OverBudget, ParamsError, StageStopped
from config.load import load, write
from config.locks import lock_file
from config.schema import Params
from config.workspace.kept import kept_params
from config.workspace.rows import pipeline_rows
from config.workspace.study import StudyFile
from costs.ledger.budget import results_key
from costs.ledger.ledger import ledger
from reporting.numbers import usd
from tasks.levers.stage_folders import link_inputs
from tasks.run.stop import StopRequest
from tasks.run.workspace import bring_code
from tasks.stage.process import last_line, run_process

STUDIES = Path(".rlhf/studies")
LOG = "study.log"
Say = Callable[[str], None]


class Variant(NamedTuple):
    """One run of a study."""

    name: str
    seed: int
    params: Params


class Outcome(NamedTuple):
    """How it ended."""

    variant: Variant
    run_id: str | None
    """Of its completed run."""
    reason: str = ""


def variants(root: Path, study: StudyFile) -> Iterator[Variant]:
    """All runs, the variants of one seed after another: they share more. Raises ParamsError for
    what params.yaml does not know.
    """
    for seed in study.seeds:
        for name, changes in study.variants.items():
            params = load(root / study.recipe, [*changes, f"seed={seed}"])
            # every reply is judged, so that variants are compared prompt by prompt
            answered = {"samples": params.evaluate.prompts}
            evaluate = params.evaluate.model_copy(update=answered)
            yield Variant(name, seed, params.model_copy(update={"evaluate": evaluate}))


def run_all(root: Path, name: str, study: StudyFile, stop: StopRequest, say: Say) -> list[Outcome]:
    """Run what has not completed yet. Raises StageStopped where it was asked to stop, OverBudget
    when the study's money is spent, ParamsError if another process runs it.
    """
    place, planned = root / STUDIES / name, list(variants(root, study))
    (root / STUDIES).mkdir(parents=True, exist_ok=True)
    found = []
    with lock_file(root / STUDIES / f".{name}.lock") as holder:
        if holder is not None:
            raise ParamsError(f"process {holder} runs this study: wait for its end, or stop it.")
        bring_code(place, {"name": "store", "url": str(place / "store")}, root / ".dvc" / "cache")
        for number, variant in enumerate(planned, start=1):
            run_id = completed(place, variant.params)
            where = f"{number} of {len(planned)}: {variant.name}, seed {variant.seed}"
            if run_id is None:
                left = None if study.max_usd is None else study.max_usd - spent(place)
                if left is not None and left <= 0:
                    raise OverBudget(
                        f"the study has cost {usd(spent(place))}, max_usd={study.max_usd:g}: raise "
                        "it in the file, and run the same command to go on."
                    )
                say(f"{where} ({usd(spent(place))} so far)")
                reason = _run(root, place, variant, left, stop)
                run_id = completed(place, variant.params)
            else:
                say(f"{where}: done before")
                reason = ""
            found.append(Outcome(variant, run_id, "" if run_id else reason))
    return found


def _run(root: Path, place: Path, variant: Variant, left: float | None, stop: StopRequest) -> str:
    """Run a variant; returns the last line that it printed."""
    link_inputs(root, place, variant.params)
    file = place / "variant.yaml"
    write(variant.params, file)
    command = [str(Path(sys.executable).with_name("rlhf")), "run", "--recipe", file.name, "--yes"]
    command += [] if left is None else ["--set", f"budget.max_usd={left}"]
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    ended = run_process(command, place, place / LOG, stop, variables={"PYTHONPATH": path})
    if stop.made:
        raise StageStopped("asked to stop: the same command goes on there.")
    return "" if ended.code == EXIT_DONE else last_line(ended.output)


def completed(place: Path, params: Params) -> str | None:
    """The newest completed run for the same results, None if there is none."""
    ended = [row for row in pipeline_rows(place) if row.event == "end" and row.state == "completed"]
    key = results_key(params)
    return next(
        (
            row.run_id
            for row in reversed(ended)
            if results_key(kept_params(place, row.run_id)) == key
        ),
        None,
    )


def spent(place: Path) -> float:
    """What the runs of a study have cost, failed ones too."""
    runs = dict.fromkeys(row.run_id for row in pipeline_rows(place) if row.event == "start")
    return sum(ledger(place, kept_params(place, run_id), run_id).total_usd for run_id in runs)
