"""The Prefect side of a retrain cycle: check for new data, decide, train, hold the contest,
promote.

runs/retrain.jsonl         how each cycle went, and what its own processes cost
runs/retrain/<cycle>/      examination.json, contest.json, replies.jsonl, cycle.md, log.txt
.rlhf/retrain.lock         held while a cycle is running: a schedule that overlaps itself ends as
                           skipped
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from config import jsonl
from config.alive import now
from config.errors import EnvironmentFault
from config.load import write
from config.locks import lock_file
from config.schema import Params
from config.workspace.at_work import locked
from config.workspace.champions import Champion
from config.workspace.retraining import (
    RETRAIN_FOLDER,
    RETRAIN_ROWS,
    Contest,
    Examination,
    RetrainRow,
)
from config.workspace.rows import pipeline_rows
from costs.planning.retraining import CONTEST
from costs.tables.price import stage_price
from tasks.champions.files import check_champion, gathered
from tasks.champions.promotion_gate import Verdict, in_a_line, promotion_verdict
from tasks.champions.registry import promote, require_champion, update_mlflow
from tasks.dvc.data_key import key_now
from tasks.dvc.status import forget
from tasks.planning.gate import approval
from tasks.planning.prepared import Planned, Unplannable, prepare
from tasks.planning.retraining import with_cycle
from tasks.retraining.decision import Decision, decide
from tasks.retraining.page import Page, markdown
from tasks.run.month import PURPOSE, month, run_usd
from tasks.run.run import STATE_FOLDER, new_run_id
from tasks.run.stop import StopRequest, as_interrupts
from tasks.stage.process import require_done, run_process
from tasks.stage.progress import Display
from tasks.ui.events import model_event

FINISHED = ("kept", "promoted")
"""Outcomes decided on a trained model: the same data need not be tried again."""


class Cycle:
    """A running retrain cycle."""

    def __init__(self, root: Path, params: Params, at_work: str | None) -> None:
        self.root, self.params = root, params
        self.id = new_run_id(flow_run.name or "retrain")
        self.flow_run_id = flow_run.id
        self.at_work = at_work
        """The other cycle that holds this project, None if there is none."""
        self.display = Display()
        self.champion: Champion | None = None
        self.data_key: str | None = None
        self.examination: Examination | None = None
        self.prepared: Planned | Unplannable | None = None
        """The plan of the training that was decided on."""
        self.decision: Decision | None = None
        self.run_id: str | None = None
        self.contest: Contest | None = None
        self.verdict: Verdict | None = None
        self.usd = 0.0
        """What the cycle has cost so far."""
        self.state: State[Any] = Completed()
        """Final state of the flow, unless it fails."""
        self.said = ""

    @property
    def folder(self) -> Path:
        return self.root / RETRAIN_FOLDER / self.id

    def record(self, event: str, **fields: Any) -> None:
        row = RetrainRow.model_validate(
            {"time": time.time(), "cycle": self.id, "event": event, **fields}
        )
        jsonl.append(self.root / RETRAIN_ROWS, row)

    def helper(self, name: str, *arguments: str) -> None:
        """Run `python -m training.retraining.<name>`, and record what it cost, however it ends.

        Raises what `tasks.stage.process.require_done` raises.
        """
        module, log, began = f"training.retraining.{name}", self.folder / "log.txt", now()
        try:
            command = [sys.executable, "-m", module, *arguments]
            ended = run_process(command, self.root, log, StopRequest())
        finally:
            usd = stage_price(self.params).usd(now() - began)
            self.usd += usd
            self.record("cost", usd=usd, detail={"process": name})
        require_done(module, ended, log)

    def end(self, outcome: str, said: str, state: State[Any] | None = None) -> None:
        """Record the outcome: as a line, a row, and an artifact in the Prefect UI."""
        self.said, self.state = said, state or Completed(name=outcome.capitalize(), message=said)
        self.record(
            "end", outcome=outcome, said=said, run_id=self.run_id, data_key=self.data_key,
            detail={"champion": self.champion.run_id if self.champion else None, "usd": self.usd},
        )  # fmt: skip
        page = markdown(
            Page(
                outcome,
                said,
                self.champion,
                self.examination,
                self.decision,
                self.run_id,
                self.contest,
                self.verdict,
                self.usd,
            )
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "cycle.md").write_text(page, encoding="utf-8")
        create_markdown_artifact(page, key="retrain", description=said)
        if outcome != "failed":  # whoever sees the error reports it
            self.display.say(f"retrain {outcome}: {said}")
        if self.contest is not None and (fault := update_mlflow(self.root, self.params)):
            self.display.say(f"warning: {fault}")


@contextmanager
def retraining(params: Params) -> Iterator[Cycle]:
    """A cycle in the current folder, which no other may work in meanwhile. It has an end in the
    rows, however it ends.
    """
    root = Path.cwd()
    with _alone(root) as at_work:
        cycle = Cycle(root, params, at_work)
        cycle.record("begin")
        try:
            with as_interrupts():
                yield cycle
        except BaseException as error:
            cycle.end(
                "failed", f"{type(error).__name__}: {error}" if not str(error) else str(error)
            )
            raise


@task(name="decide", cache_policy=NO_CACHE, persist_result=False)
def is_due(cycle: Cycle, force: bool) -> bool:
    """Whether to train now; if not, the cycle has ended as skipped. Raises UserError without a
    usable champion.
    """
    root, params = cycle.root, cycle.params
    reason = cycle.at_work or _workspace_is_taken(root)
    if reason is None:
        cycle.champion = require_champion(root)
        champion_folder = check_champion(root, cycle.champion.run_id)
        cycle.data_key = key_now(root, params)
        reason = None if force else nothing_new(root, cycle.champion, cycle.data_key)
    if reason is not None:
        cycle.end("skipped", reason)
        return False
    cycle.examination = _examined(cycle, champion_folder)
    if cycle.data_key is None and cycle.examination.changed_rows:
        forget(root, "data")  # DVC cannot see that a URL or a dataset of the hub has changed
    cycle.prepared = prepare(root, params)
    whole = with_cycle(cycle.prepared, examined=True)
    planned_usd = whole.ahead_total.usd if isinstance(whole, Planned) else None
    cycle.decision = decide(
        cycle.examination, planned_usd, month(root, params, time.time()), params.retrain, force
    )
    if not cycle.decision.train:
        cycle.end("skipped", cycle.decision.reasons[0])
        return False
    if isinstance(whole, Planned) and (contest := whole.ahead.get(CONTEST)):
        cycle.record("reserved", usd=contest.usd)
    cycle.display.say("retrain: " + "; ".join(cycle.decision.reasons))
    return True


def _examined(cycle: Cycle, champion_folder: Path) -> Examination:
    """Compare today's data with the champion's, in a separate process."""
    cycle.folder.mkdir(parents=True, exist_ok=True)
    params, target = cycle.folder / "params.yaml", cycle.folder / "examination.json"
    write(cycle.params, params)
    where = ("--params", str(params), "--champion", str(champion_folder), "--out", str(target))
    cycle.helper("examine", *where)
    return Examination.model_validate_json(target.read_bytes())


def wait_for_approval(cycle: Cycle) -> None:
    """Where a server started the cycle: pause above `budget.approval_usd`, as the flow rlhf does
    when it is started by itself.
    """
    assert cycle.prepared is not None
    approval(with_cycle(cycle.prepared, examined=True))


def is_trained(cycle: Cycle, state: State[Any]) -> bool:
    """Whether the pipeline run in `state` completed; if it was stopped, the cycle has ended as
    stopped. Raises what made the run fail.
    """
    cycle.run_id = _run_of(cycle)
    cycle.usd += run_usd(cycle.root, cycle.params, cycle.run_id) if cycle.run_id else 0.0
    if state.is_cancelled():
        said = (
            f"{state.message or 'the run was stopped'} The champion stays; the next cycle goes on "
            "from there."
        )
        cycle.end("stopped", said, Cancelled(name=state.name, message=said))
        return False
    state.result()  # raises what made it fail
    return True


@task(name="contest", cache_policy=NO_CACHE, persist_result=False)
def wins(cycle: Cycle) -> bool:
    """Compare the new model with the champion; if it does not pass the gate, the cycle has ended
    with the champion kept.

    Both are folders of their own, by the digests of their runs: the checkout may be another run's
    by now.
    """
    assert cycle.champion is not None
    assert cycle.run_id is not None
    champion = check_champion(cycle.root, cycle.champion.run_id)
    target = cycle.folder / "contest.json"
    with gathered(cycle.root, cycle.run_id, cycle.folder / "challenger") as challenger:
        cycle.helper(
            "contest",
            "--champion",
            str(champion),
            "--challenger",
            str(challenger),
            "--out",
            str(target),
        )
        evaluation = _evaluation(challenger)
    cycle.contest = Contest.model_validate_json(target.read_bytes())
    cycle.verdict = promotion_verdict(cycle.contest, *evaluation, cycle.usd, cycle.params.retrain)
    if not cycle.verdict.promotes:
        cycle.end(
            "kept", f"the champion {cycle.champion.run_id} stays: {in_a_line(cycle.verdict.failed)}"
        )
    return cycle.verdict.promotes


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def put_in_place(cycle: Cycle) -> None:
    """Make the new model the champion, if the one it was compared with still is."""
    assert cycle.champion is not None
    assert cycle.run_id is not None
    assert cycle.verdict is not None
    why = cycle.verdict.checks[0].reason
    promote(cycle.root, cycle.run_id, why, by="retrain", instead_of=cycle.champion.run_id)
    said = f"{cycle.run_id} is the champion instead of {cycle.champion.run_id}: {why}"
    model_event("promoted", cycle.run_id, said, instead_of=cycle.champion.run_id)
    cycle.end("promoted", said)


# ---------------------------------------------------------------- helpers


def nothing_new(root: Path, champion: Champion, key: str | None) -> str | None:
    """Why nothing needs to be read: these very inputs have been decided on."""
    if key is None:
        return None
    if key == champion.data_key:
        return (
            "nothing is new since the champion's data: neither the sources nor the votes have "
            "changed, so nothing was read and it cost nothing"
        )
    rows: list[RetrainRow] = jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows
    last = next(
        (row for row in reversed(rows) if row.event == "end" and row.outcome in FINISHED), None
    )
    if last is not None and last.data_key == key:
        return (
            f"nothing is new since the cycle {last.cycle}, which ended as {last.outcome} "
            f"({last.said}); it cost nothing"
        )
    return None


def _workspace_is_taken(root: Path) -> str | None:
    try:
        with locked(root):
            return None
    except EnvironmentFault as fault:
        return str(fault)


def _run_of(cycle: Cycle) -> str | None:
    """The pipeline run that this cycle started."""
    rows = pipeline_rows(cycle.root)
    own = (
        row.run_id
        for row in reversed(rows)
        if row.event == "start" and row.detail.get(PURPOSE) == cycle.flow_run_id
    )
    return next(own, None)


def _evaluation(challenger: Path) -> tuple[bool | None, str]:
    """Whether the run's own evaluation found reward hacking, against its SFT model, None where it
    could not tell, and why it says so.
    """
    found = json.loads((challenger / "metrics" / "evaluate.json").read_text(encoding="utf-8"))
    return found["reward_hacking"], str(found.get("reward_hacking_reason", ""))


@contextmanager
def _alone(root: Path) -> Iterator[str | None]:
    """Hold the lock of the cycles; yields which one holds it already, None if this one does from
    here on.
    """
    with lock_file(root / STATE_FOLDER / "retrain.lock") as holder:
        yield (
            None
            if holder is None
            else f"a cycle is running already (process {holder}), and this one has nothing to add "
            "to it"
        )
