"""The runs of a study, one after another in a workspace of its own: `.rlhf/studies/NAME`, with the project's code, its
own rows and the project's DVC cache.

A variant is a run of the pipeline with its params: what a run before it made with the same parameters is found
unchanged, and a run that was stopped goes on from its checkpoint. One runs at a time: what it costs is measured, on a
machine that does nothing else.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from config.errors import OverBudget, ParamsError
from config.load import load
from config.locks import lock_file
from config.schema import Params
from config.workspace.kept import kept_params
from config.workspace.login import MLFLOW_KEY, SERVERS
from config.workspace.machine import MACHINE_FILE
from config.workspace.project import STUDIES, study_name
from config.workspace.rows import pipeline_rows
from config.workspace.study import StudyFile
from costs.ledger.budget import results_key, total
from reporting.comparison.runs import Comparison, Variant, compare, read_run
from reporting.numbers import duration, usd
from tasks.planning.prepared import Planned, Unplannable, prepare
from tasks.run.purse import refusal, run_usd
from tasks.run.workspace import HOME, bring_code, link, link_inputs
from tasks.stage.progress import Display

PAGE, RECORD = "study.html", "study.json"
"""Files of the comparison in the study's workspace."""
OF_THE_PROJECT = (MACHINE_FILE, SERVERS, MLFLOW_KEY)
"""Paths that a workspace shares with the project if they exist."""


class Work(NamedTuple):
    """One run of a study."""

    name: str
    seed: int
    params: Params


class Study:
    """A study that this process runs."""

    def __init__(self, root: Path, file: Path, content: StudyFile) -> None:
        self.root, self.file, self.content = root, file, content
        self.name = study_name(file)
        self.place = root / STUDIES / self.name
        self.works = works(root, content)
        self.reasons = dict[tuple[str, int], str]()
        """Why a run did not complete."""
        self.display = Display()

    def ahead(self) -> Iterator[tuple[Work, Planned | Unplannable]]:
        """Every run that has not completed, with its plan, when it is its turn. Raises OverBudget when the study's
        money is spent.
        """
        before = completed(self.place)
        for number, work in enumerate(self.works, start=1):
            where = f"{number} of {len(self.works)}: {work.name}, seed {work.seed}"
            if results_key(work.params) in before:
                self.display.say(f"{where}: done before")
                continue
            if (why := refusal(self.place, work.params)) is not None:
                raise OverBudget(why)
            so_far = spent(self.place)
            link_inputs(self.root, self.place, work.params)
            prepared = prepare(self.place, work.params)
            continued = total(prepared.spent).usd
            params = limit_budget(work.params, self.content.max_usd, so_far, continued)
            prepared = replace(prepared, params=params)
            planned = (
                f"planned {usd(prepared.ahead_total.usd)} and {duration(prepared.ahead_total.seconds)}, "
                if isinstance(prepared, Planned)
                else ""
            )
            self.display.say(f"{where}: {planned}{usd(so_far)} so far")
            yield work._replace(params=params), prepared

    def failed(self, work: Work, reason: str) -> None:
        """Keep why a run failed; the others go on."""
        self.reasons[work.name, work.seed] = reason
        self.display.say(f"{work.name}, seed {work.seed} failed: {reason}")

    def result(self) -> Comparison:
        """The comparison of what has completed."""
        run_ids = completed(self.place)
        runs = {
            (work.name, work.seed): read_run(self.place, run_ids[key])
            for work in self.works
            if (key := results_key(work.params)) in run_ids
        }
        variants = [
            Variant(
                name,
                {seed: runs[name, seed] for seed in self.content.seeds if (name, seed) in runs},
                changes,
                next((self.reasons[key] for key in self.reasons if key[0] == name), ""),
            )
            for name, changes in self.content.variants.items()
        ]
        return compare(variants, self.content.margin, self.content.growth, spent(self.place))


@contextmanager
def opened(root: Path, file: Path, content: StudyFile) -> Iterator[Study]:
    """Hold the workspace of a study, with today's code. Raises ParamsError if another process runs it, or for what
    params.yaml does not know.
    """
    study = Study(root, file, content)
    study.place.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(study.place.parent / f".{study.name}.lock") as holder:
        if holder is not None:
            raise ParamsError(f"process {holder} runs this study: wait for its end, or stop it.")
        remote = {"name": "store", "url": str(study.place / "store")}
        bring_code(study.place, remote, root / ".dvc" / "cache")
        for path in OF_THE_PROJECT:
            if (root / path).exists():
                link(study.place / path, root / path)
        yield study


def works(root: Path, content: StudyFile) -> list[Work]:
    """All runs, the variants of one seed after another: they share more. Raises ParamsError for what params.yaml does
    not know.
    """
    planned, names = [], dict[str, str]()
    for seed in content.seeds:
        for name, changes in content.variants.items():
            params = load(in_project(root, content.recipe), [*content.set, *changes, f"seed={seed}"])
            # every reply is kept, so that variants are compared prompt by prompt
            evaluate = params.evaluate.model_copy(update={"samples": params.evaluate.prompts})
            tracking = params.tracking.model_copy(update={"uri": _tracking_uri(root, params)})
            update = {"evaluate": evaluate, "tracking": tracking}
            work = Work(name, seed, params.model_copy(update=update))
            same = names.setdefault(results_key(work.params), name)
            if same != name:
                raise ParamsError(
                    f"variants {same!r} and {name!r} have the same results: what they change is in the recipe "
                    "already, or only in where, budget, prices or tracking, which change none. Take one out."
                )
            planned.append(work)
    return planned


def in_project(root: Path, file: Path) -> Path:
    """A study or a recipe: the project's, else that of the code, where a worker's workspace has none."""
    return root / file if (root / file).exists() else HOME / file


def _tracking_uri(root: Path, params: Params) -> str:
    """The project's MLflow, for a workspace elsewhere. In the stack of containers, whose recipes do not know its
    server, that of the environment.
    """
    from tracking.client import resolved_uri

    uri = os.environ.get("MLFLOW_TRACKING_URI") if root.resolve() != HOME else None
    return uri or resolved_uri(root, params.tracking.uri)


def limit_budget(params: Params, max_usd: float | None, so_far: float, continued: float) -> Params:
    """The params with what is left of the study's money, and with what the run has spent itself already, which its
    budget counts: `continued` of `so_far`. Raises OverBudget if nothing is left.
    """
    if max_usd is None:
        return params
    if so_far >= max_usd:
        raise OverBudget(
            f"the study has cost {usd(so_far)}, max_usd={max_usd:g}: raise it in the file, and run "
            "the same command to go on."
        )
    limit = params.budget.max_usd
    max_usd_left = min(max_usd - so_far + continued, math.inf if limit is None else limit)
    return params.model_copy(update={"budget": params.budget.model_copy(update={"max_usd": max_usd_left})})


def completed(place: Path) -> dict[str, str]:
    """Key of the results -> the newest completed run that has them."""
    ended = [row for row in pipeline_rows(place) if row.event == "end" and row.state == "completed"]
    return {results_key(kept_params(place, row.run_id)): row.run_id for row in ended}


def spent(place: Path) -> float:
    """What the runs of a study have cost, failed ones too."""
    runs = dict.fromkeys(row.run_id for row in pipeline_rows(place) if row.event == "start")
    return sum(run_usd(place, kept_params(place, run_id), run_id) for run_id in runs)
