"""Watches the cost of a running stage, and decides when the budget is used up."""

import time
from pathlib import Path

from config.alive import now
from config.errors import OverBudget
from config.records import STAGES
from config.workspace.at_work import run_at_work
from config.workspace.project import workspaces_of
from config.workspace.rows import pipeline_rows
from costs.ledger.attempts import read_attempts
from costs.ledger.budget import NOTHING, PER_MONTH, Cost, Limit, TimeLeft, limits, must_stop, time_left, total
from costs.tables.price import stage_price
from tasks.planning.prepared import spent_by_runs
from tasks.run.purse import PURPOSE, Month, expenses_of, month
from tasks.run.run import Run
from tasks.stage.progress import Watch

MONTHLY = "retrain.monthly_usd"
ELSEWHERE_EVERY_SECONDS = 5.0


class BudgetWatch:
    """The budget of one stage process, from before it starts until it ends."""

    def __init__(self, run: Run, stage: str, local: bool = True) -> None:
        """`local`: the process is of this machine; a container waits in a queue first, its pids are its own."""
        self._run, self._stage, self._local = run, stage, local
        self._price = stage_price(run.params, stage)
        rows = pipeline_rows(run.root)
        self._spent = spent_by_runs(run.root, run.params, rows, run.run_id)
        self._processes = run.params.where.of(stage).processes
        self._began_at = now()
        """Hours count from the allocation: imports and loading are paid for too."""
        self._months: dict[str, Month] = {}
        """Limit -> what the project has spent this month before this process; of a run that a retrain cycle started,
        what its cycles have too.
        """
        if run.params.budget.monthly_usd is not None:
            self._months[PER_MONTH] = month(run.root, run.params, time.time(), every_run=True)
        if any(row.run_id == run.run_id and row.detail.get(PURPOSE) for row in rows):
            self._months[MONTHLY] = month(run.root, run.params, time.time())
        self._elsewhere: dict[Path, float] = {}
        """Other workspace of the project -> US dollars that it has spent since this process began."""
        self._asked_at = now()
        self._paid_usd = 0.0
        """What the process has paid to others so far: a judge's endpoint."""
        self.reached: Limit | None = None
        """The limit that ended the stage."""

    def refuse_without_room(self) -> None:
        """Raise OverBudget if the stage could not even start within the budget."""
        room = self.time_left(1)
        if room is not None and room.seconds <= self._start_seconds():
            limit, used = room.limit, room.limit.amount(total(self._spent, room.limit.stage))
            if limit.key in self._months:
                used = self._months[limit.key].spent_usd
            raise OverBudget(
                f"{limit.key}={limit.value:g} leaves no room to start {self._stage}: {used:.4g} "
                f"{limit.unit} are spent. {_go_on(limit)}"
            )

    def time_left(self, world_size: int) -> TimeLeft | None:
        """Wall seconds left by the tightest limit: of the run's budget or a month's."""
        paid = Cost(self._paid_usd, 0.0)
        spent = {**self._spent, self._stage: self._spent.get(self._stage, NOTHING).plus(paid)}
        rooms = [time_left(self._run.params.budget, spent, self._stage, world_size, self._price)]
        for key, spending in self._months.items():
            if spending.limit_usd is not None and spending.left_usd is not None:
                limit = Limit(key, spending.limit_usd, "USD", None)
                elsewhere = sum(self._elsewhere.values()) if key == PER_MONTH else 0.0
                left_usd = spending.left_usd - self._paid_usd - elsewhere
                rooms.append(TimeLeft(left_usd / self._price.usd(1.0, world_size), limit))
        return min((room for room in rooms if room is not None), default=None)

    def usd_left(self) -> float | None:
        """US dollars left by the tightest limit on money, before the process starts."""
        rooms = [
            limit.value - limit.amount(total(self._spent, limit.stage))
            for limit in limits(self._run.params.budget)
            if limit.unit == "USD" and limit.stage in (None, self._stage)
        ]
        rooms += [spending.left_usd for spending in self._months.values() if spending.left_usd is not None]
        return min(rooms, default=None)

    def _start_seconds(self) -> float:
        """Seconds that the last start of this stage took, else that of the slowest other stage; 0 if none ever
        started.
        """
        latest = {}
        for stage in STAGES:
            starts = [
                row.seconds
                for attempt in read_attempts(self._run.root / "runs" / stage)[0]
                for row in attempt.usage
                if row.phase == "start"
            ]
            if starts:
                latest[stage] = starts[-1]
        return latest.get(self._stage, max(latest.values(), default=0.0))

    def look(self, watch: Watch) -> bool:
        """Compare what the stage has cost by now with its limits, and note in `reached` the first that it must stop
        for. Returns whether there is one. Between the stage's rows its cost grows with the wall time.
        """
        attempt, self._paid_usd = watch.attempt, watch.paid_usd
        self._ask_elsewhere()
        costs = self._local if attempt is None else attempt.event != "end"
        if self.reached is None and costs:
            room = self.time_left(attempt.world_size if attempt else self._processes)
            began = self._began_at if self._local else watch.began
            if room is not None and must_stop(watch.pace, now(), began + room.seconds):
                self.reached = room.limit
        return self.reached is not None

    def _ask_elsewhere(self) -> None:
        """What runs of the project in other workspaces spend meanwhile counts for the month too."""
        spending = self._months.get(PER_MONTH)
        if spending is None or now() - self._asked_at < ELSEWHERE_EVERY_SECONDS:
            return
        self._asked_at, root = now(), self._run.root.resolve()
        for workspace in workspaces_of(root):
            if workspace != root and run_at_work(workspace):
                before = sum(expense.usd for expense in spending.expenses if expense.workspace == workspace)
                today = expenses_of(workspace, self._run.params, spending.name)
                self._elsewhere[workspace] = sum(expense.usd for expense in today) - before

    def over(self, message: str) -> OverBudget:
        """The exception to raise once the stage has stopped at the limit; `message` is the stage's own."""
        assert self.reached is not None
        return OverBudget(f"{self.reached.key}={self.reached.value:g} is reached. {message} {_go_on(self.reached)}")


def _go_on(limit: Limit) -> str:
    return f"Go on with a higher limit: rlhf run --set {limit.key}=..."
