"""The Prefect side of a retrain cycle: check for new data, decide, train, hold the contest, promote.

runs/retrain.jsonl         how each cycle went, and what its own processes cost
runs/retrain/<cycle>/      examination.json, contest.json, replies.jsonl, cycle.md, log.txt
.rlhf/retrain.lock         held while a cycle is running: a schedule that overlaps itself ends as
                           skipped
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from config import jsonl
from config.alive import now
from config.errors import EnvironmentFault, OverBudget
from config.load import write
from config.locks import lock_file
from config.schema import Params
from config.workspace.at_work import locked
from config.workspace.champions import Champion
from config.workspace.feedback import FEEDBACK, FeedbackStore
from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, Contest, Examination, RetrainRow
from config.workspace.rows import pipeline_rows
from costs.planning.retraining import CONTEST
from costs.tables.price import stage_price
from tasks.champions.files import check_champion, gathered
from tasks.champions.live import live_share
from tasks.champions.promotion_gate import in_a_line, promotion_verdict
from tasks.champions.registry import promote, require_champion, update_mlflow
from tasks.dvc.data_key import key_now
from tasks.dvc.status import remove_from_lock
from tasks.planning.gate import approval
from tasks.planning.prepared import Planned, Unplannable, prepare
from tasks.planning.retraining import with_cycle
from tasks.retraining.decision import decide
from tasks.retraining.page import contest_section, data_section, decision_section, feedback_section, markdown
from tasks.run.purse import PURPOSE, month, refusal, run_usd
from tasks.run.run import STATE_FOLDER, new_run_id
from tasks.run.stop import OVER_BUDGET, StopRequest, as_interrupts
from tasks.stage.process import require_done, run_process
from tasks.stage.progress import Display
from tasks.ui.events import model_event

CONTEST_FILE = "contest.json"
TRIAL, FINISHED = "trial", ("kept", "promoted")
"""Outcomes decided on a trained model: the same data need not be tried again."""


class Due(NamedTuple):
    """Findings and decision of a cycle that trains."""

    champion: Champion
    prepared: Planned | Unplannable
    """The plan of the training."""


class Winner(NamedTuple):
    """A model that passed the gate."""

    run_id: str
    why: str


class Cycle:
    """A running retrain cycle."""

    def __init__(self, root: Path, params: Params) -> None:
        self.root, self.params = root, params
        self.id = new_run_id(flow_run.name or "retrain")
        self.flow_run_id = flow_run.id
        self.display = Display()
        self.row_fields: dict[str, str | None] = {"run_id": None, "data_key": None, "champion": None}
        """Fields of the cycle's last row, as far as the cycle got."""
        self.sections: list[str] = []
        """Sections of the page, one per step."""
        self.usd = 0.0
        """US dollars spent by the cycle so far."""
        self.state: State[Any] = Completed()
        """Final state of the flow, unless it fails."""

    @property
    def folder(self) -> Path:
        return self.root / RETRAIN_FOLDER / self.id

    def record(self, event: str, **fields: Any) -> None:
        row = RetrainRow.model_validate({"time": time.time(), "cycle": self.id, "event": event, **fields})
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
        self.state = state or Completed(name=outcome.capitalize(), message=said)
        self.record(
            "end", outcome=outcome, said=said, run_id=self.row_fields["run_id"],
            data_key=self.row_fields["data_key"],
            detail={"champion": self.row_fields["champion"], "usd": self.usd},
        )  # fmt: skip
        if (self.root / FEEDBACK).exists():
            with closing(FeedbackStore(self.root)) as store:
                self.sections.append(feedback_section(store.summary()))
        page = markdown(outcome, said, self.sections, self.usd)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "cycle.md").write_text(page, encoding="utf-8")
        create_markdown_artifact(page, key="retrain", description=said)
        if outcome != "failed":  # whoever sees the error reports it
            self.display.say(f"retrain {outcome}: {said}")
        held = (self.folder / CONTEST_FILE).exists()
        if held and (fault := update_mlflow(self.root, self.params)):
            self.display.say(f"warning: {fault}")


@contextmanager
def retraining(params: Params) -> Iterator[Cycle]:
    """A cycle in the current folder. It has an end in the rows, however it ends."""
    cycle = Cycle(Path.cwd(), params)
    cycle.record("begin")
    try:
        with as_interrupts():
            yield cycle
    except OverBudget as error:
        cycle.end("stopped", str(error), Cancelled(name=OVER_BUDGET, message=str(error)))
    except BaseException as error:
        cycle.end("failed", str(error) or f"{type(error).__name__}: {error}")
        raise


@contextmanager
def alone(cycle: Cycle) -> Iterator[str | None]:
    """Hold the lock of the cycles; yields why this one has nothing to do if another has it."""
    with lock_file(cycle.root / STATE_FOLDER / "retrain.lock") as holder:
        yield (
            None
            if holder is None
            else f"a cycle is running already (process {holder}), and this one has nothing to add to it"
        )


@task(name="decide", cache_policy=NO_CACHE, persist_result=False)
def due(cycle: Cycle, busy: str | None, force: bool) -> Due | None:
    """Whether to train now; if not, the cycle has ended as skipped. Raises UserError without a usable champion."""
    root, params = cycle.root, cycle.params
    reason = busy or _workspace_is_taken(root)
    if reason is None:
        champion = require_champion(root)
        champion_folder = check_champion(root, champion.run_id)
        key = key_now(root, params)
        cycle.row_fields |= {"champion": champion.run_id, "data_key": key}
        cycle.sections.append(f"Champion at the start: `{champion.run_id}`.")
        reason = refusal(root, params) or (None if force else nothing_new(root, champion, key))
    if reason is not None:
        cycle.end("skipped", reason)
        return None
    examination = _examined(cycle, champion_folder)
    cycle.sections.append("## The data\n\n" + data_section(examination))
    if key is None and examination.changed_rows:
        remove_from_lock(root, "data")  # DVC cannot see that a URL or a dataset of the hub has changed
    prepared = prepare(root, params)
    whole = with_cycle(prepared, examined=True)
    planned_usd = whole.ahead_total.usd if isinstance(whole, Planned) else None
    decision = decide(examination, planned_usd, month(root, params, time.time()), params.retrain, force)
    cycle.sections.append(decision_section(decision))
    if not decision.train:
        cycle.end("skipped", decision.reasons[0])
        return None
    if isinstance(whole, Planned) and (contest := whole.ahead.get(CONTEST)):
        cycle.record("reserved", usd=contest.usd)
    cycle.display.say("retrain: " + "; ".join(decision.reasons))
    return Due(champion, prepared)


def _examined(cycle: Cycle, champion_folder: Path) -> Examination:
    """Compare today's data with the champion's, in a separate process."""
    cycle.folder.mkdir(parents=True, exist_ok=True)
    params, target = cycle.folder / "params.yaml", cycle.folder / "examination.json"
    write(cycle.params, params)
    where = ("--params", str(params), "--champion", str(champion_folder), "--out", str(target))
    cycle.helper("examine", *where)
    return Examination.model_validate_json(target.read_bytes())


def wait_for_approval(reason: Due) -> None:
    """Pause above `budget.approval_usd` if a server started the cycle, as the flow rlhf does by itself."""
    approval(with_cycle(reason.prepared, examined=True))


def trained(cycle: Cycle, state: State[Any]) -> str | None:
    """The pipeline run in `state` if it completed; if it was stopped, the cycle has ended as stopped. Raises what made
    the run fail.
    """
    run_id = _run_of(cycle)
    cycle.row_fields["run_id"] = run_id
    cycle.usd += run_usd(cycle.root, cycle.params, run_id) if run_id else 0.0
    if state.is_cancelled():
        message = f"{state.message or 'the run was stopped'} The champion stays; the next cycle goes on from there."
        cycle.end("stopped", message, Cancelled(name=state.name, message=message))
        return None
    state.result()  # raises what made it fail
    return run_id


@task(name="contest", cache_policy=NO_CACHE, persist_result=False)
def winner(cycle: Cycle, champion: Champion, run_id: str) -> Winner | None:
    """Compare the model of a run with the champion; if it does not pass the gate, the cycle has ended with the
    champion kept.

    Both are folders of their own, by the digests of their runs: the checkout may be another run's by now.
    """
    folder, target = check_champion(cycle.root, champion.run_id), cycle.folder / CONTEST_FILE
    with gathered(cycle.root, run_id, cycle.folder / "challenger") as challenger:
        sides = ("--champion", str(folder), "--challenger", str(challenger))
        cycle.helper("contest", *sides, "--out", str(target))
        evaluation = _evaluation(challenger)
    contest = Contest.model_validate_json(target.read_bytes())
    cycle.usd += contest.judge_usd  # the contest has recorded each answer when it paid it
    verdict = promotion_verdict(contest, *evaluation, cycle.usd, cycle.params.retrain)
    cycle.sections.append(contest_section(run_id, contest, verdict))
    if contest.judge_waits and verdict.failed == verdict.checks[:1]:
        cycle.end("waiting", f"the champion {champion.run_id} stays until people have judged "
                  f"{run_id}: {contest.judge_fault}")  # fmt: skip
        return None
    if not verdict.promotes:
        cycle.end("kept", f"the champion {champion.run_id} stays: {in_a_line(verdict.failed)}")
        return None
    if cycle.params.retrain.evidence == "live":
        cycle.end(TRIAL, f"{run_id} wins the contest, and retrain.evidence=live asks users: rlhf serve champion "
                  f"--challenger {run_id} --keep-replies 30")  # fmt: skip
        return None
    return Winner(run_id, verdict.checks[0].reason)


@task(name="ask users", cache_policy=NO_CACHE, persist_result=False)
def users_decide(cycle: Cycle, busy: str | None, force: bool) -> bool:
    """Whether a challenger is on trial: then the cycle has ended as promoted, kept, or on trial still."""
    root, row = cycle.root, last_end(cycle.root, (TRIAL, *FINISHED))
    if busy or force or row is None or row.run_id is None or row.outcome != TRIAL:
        return False
    champion = require_champion(root)
    if row.detail.get("champion") != champion.run_id:
        return False
    cycle.row_fields |= {"champion": champion.run_id, "run_id": row.run_id, "data_key": row.data_key}
    live = live_share(root, row.run_id, champion.run_id, cycle.params.evaluate.confidence)
    cycle.sections.append("## Thumbs\n\n" + live.reason)
    if live.difference.low > 0:
        put_in_place.fn(cycle, champion, Winner(row.run_id, live.reason))
    elif live.difference.high < 0:
        cycle.end("kept", f"the champion {champion.run_id} stays: {live.reason}")
    else:
        cycle.end(TRIAL, live.reason)
    return True


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def put_in_place(cycle: Cycle, champion: Champion, won: Winner) -> None:
    """Make the winner the champion, if the one it was compared with still is."""
    promote(cycle.root, won.run_id, won.why, by="retrain", instead_of=champion.run_id)
    message = f"{won.run_id} is the champion instead of {champion.run_id}: {won.why}"
    model_event("promoted", won.run_id, message, instead_of=champion.run_id)
    cycle.end("promoted", message)


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
    last = last_end(root, FINISHED)
    if last is not None and last.data_key == key:
        return (
            f"nothing is new since the cycle {last.cycle}, which ended as {last.outcome} "
            f"({last.said}); it cost nothing"
        )
    return None


def last_end(root: Path, outcomes: Sequence[str]) -> RetrainRow | None:
    """The end of the last cycle with one of these outcomes."""
    rows: list[RetrainRow] = jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows
    return next((row for row in reversed(rows) if row.event == "end" and row.outcome in outcomes), None)


def _workspace_is_taken(root: Path) -> str | None:
    try:
        with locked(root):
            return None
    except EnvironmentFault as fault:
        return str(fault)


def _run_of(cycle: Cycle) -> str | None:
    """The pipeline run that this cycle started."""
    rows = pipeline_rows(cycle.root)
    run_ids = (
        row.run_id for row in reversed(rows) if row.event == "start" and row.detail.get(PURPOSE) == cycle.flow_run_id
    )
    return next(run_ids, None)


def _evaluation(challenger: Path) -> tuple[bool | None, str]:
    """Whether the run's own evaluation found reward hacking, against its SFT model, None where it could not tell, and
    why it says so.
    """
    metrics = json.loads((challenger / "metrics" / "evaluate.json").read_text(encoding="utf-8"))
    return metrics["reward_hacking"], str(metrics.get("reward_hacking_reason", ""))
