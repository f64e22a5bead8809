"""The pipeline's side of a stage on nodes of a Ray cluster: place it, take its rows, pass on a stop, judge its end.

Only rows, parameters and locks pass through Ray, as return values. Data, models and checkpoints go to the DVC remote
and come from there; how long to wait, when to stop and what an end means is decided here and in the stage.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config import jsonl
from config.atomic_file import write_atomically
from config.errors import EnvironmentFault, StageStopped, UserError
from config.inputs import reward_files
from config.load import dump as dump_params
from config.locks import CHECKPOINT_SECONDS
from tasks.cluster.checkpoints import CheckpointStore
from tasks.cluster.node import Facts, News
from tasks.cluster.nodes import POLL_SECONDS, START_SECONDS, NodeLost, actors, ask_all, connected, leaving
from tasks.cluster.work import Reply
from tasks.dvc.inputs_stage import OUTS
from tasks.dvc.pull import remote_of, small_outputs
from tasks.dvc.reuse import reuse
from tasks.dvc.transfers import fetch, note_pushed, send_outputs
from tasks.run.changed_code import policy
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.store import Store
from tasks.run.transient import persist
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.progress import Display, Watch
from tasks.stage.runner import Observer, record, require_same_params

logger = logging.getLogger(__name__)

STORE_PATIENCE_SECONDS = 240.0
PREEMPTIONS = 20
"""Times a stage goes on with other nodes after losing one, before that counts as a crash."""


def run_placed(run: Run, stage: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Bring the outputs of `stage` up to date on nodes of its pool; as `tasks.stage.runner.run_stage`, which does it
    here.

    Raises UserError, StageStopped, OverBudget, StageCrashed.
    """
    require_same_params(run, stage)
    if stop.requested:
        raise StageStopped(
            f"Stopped before {stage}, as asked. Everything before it is kept: run again to resume there."
        )
    if reuse(run.root, run.params, stage, Display().say, placed=True):
        outcome = Outcome(cached=True, attempt=None)
    else:
        outcome = _on_nodes(run, stage, stop, observe)
    persist(lambda: fetch(run.root, small_outputs(run.root, stage)), lambda: stop.requested, STORE_PATIENCE_SECONDS)
    return record(run, stage, outcome)


def _on_nodes(run: Run, stage: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Run on nodes of the pool, and on others where they are taken away."""
    try:
        persist(lambda: send_outputs(run.root), lambda: stop.requested, STORE_PATIENCE_SECONDS)
    except EnvironmentFault as fault:
        pool = run.params.where.of(stage).pool
        raise EnvironmentFault(f"{stage} is placed on {pool} and cannot get its inputs: {fault}") from None
    with connected(run.root):
        for _ in range(PREEMPTIONS):
            budget = BudgetWatch(run, stage, local=False)
            budget.refuse_without_room()
            reply = _on_these(run, stage, stop, budget, observe)
            if reply.kind != "stopped" or stop.requested or budget.reached is not None:
                break
            logger.warning("%s has lost its node: %s Going on with another one.", stage, reply.message)
    match reply.kind:
        case "done":
            write_atomically(run.root / "dvc.lock", reply.lock)
            note_pushed(run.root)  # by us before the stage, and by its first node
            _remove_checkpoints(run, stage)
            return Outcome(cached=reply.cached, attempt=reply.attempt)
        case "bad_input":
            raise UserError(reply.message)
        case "stopped" if budget.reached is not None and not stop.requested:
            raise budget.over(reply.message)
        case "stopped":
            raise StageStopped(reply.message)
        case _:
            raise StageCrashed(reply.message, reply.hopeless)


def _on_these(run: Run, stage: str, stop: StopRequest, budget: BudgetWatch, observe: Observer) -> Reply:
    """Run on the nodes that Ray gives; one that is lost counts as a stop."""
    watch = Watch(run.root, run.params, stage)
    try:
        with actors(run, stage, stop, START_SECONDS) as (started, facts):
            crew = Crew(run, stage, started, facts)
            try:
                return crew.follow(watch, stop, budget, observe)
            finally:
                crew.close()
    except NodeLost as lost:
        note_loss(run.root / "runs" / stage, watch)
        return Reply("stopped", f"{stage}: {lost}")


def _remove_checkpoints(run: Run, stage: str) -> None:
    """Those of a stage that is done, once its lock is here; before, the next run would need them."""
    try:
        CheckpointStore(run.root, stage, Store(remote_of(run.root)["url"]), run.run_id).remove()
    except EnvironmentFault as error:
        logger.warning("checkpoints of a stage that is done stay in the store: %s", error)


class Crew:
    """The nodes of a placed stage, from the request to the reply."""

    def __init__(self, run: Run, stage: str, started: Sequence[Any], facts: Sequence[Facts]) -> None:
        """Start the stage's process on each node."""
        self._stage, self._actors, self._facts = stage, started, facts
        self._folder = run.root / "runs" / stage
        self._stops_sent = 0
        identity = f"{stage}-{uuid.uuid4().hex[:8]}"
        texts = _files_of(run.root, ["dvc.lock", *map(str, OUTS), f"runs/{stage}/attempts.jsonl",
                                     *reward_files(run.root, run.params)])  # fmt: skip
        texts["params.yaml"] = dump_params(run.params)
        self._offsets = [
            {"attempts.jsonl": len(texts.get(f"runs/{stage}/attempts.jsonl", "").encode())} for _ in started
        ]
        requests = [
            {
                "id": f"{identity}-{number}", "run_id": run.run_id, "stage": stage, "node": number,
                "launch": _launch(number, facts),
                "changed_code": policy(), "remote": remote_of(run.root),
            }
            for number in range(len(started))
        ]  # fmt: skip
        ask_all(started, "start", [(request, texts) for request in requests])

    def follow(self, watch: Watch, stop: StopRequest, budget: BudgetWatch, observe: Observer) -> Reply:
        """Copy rows to runs/<stage>/ and pass on requests to stop until the stage has ended on every node. Raises
        NodeLost.
        """
        replies: list[bytes | None] = [None] * len(self._actors)
        try:
            while None in replies:
                replies = [news.reply for news in self._news()]
                observe(watch.look())
                self._pass_on(max(stop.requests, int(budget.look(watch) or leaving(self._facts))))
                time.sleep(POLL_SECONDS if None in replies else 0.0)
        except NodeLost:
            raise
        except BaseException:
            self._pass_on(1)
            with suppress(NodeLost):
                self._wait_for_checkpoint()
            raise
        observe(watch.look())
        return _worst([Reply.of(reply) for reply in replies if reply is not None])

    def _news(self) -> list[News]:
        """What is new on every node, written here."""
        received: list[News] = ask_all(self._actors, "news", [(offsets,) for offsets in self._offsets])
        for number, (news, offsets) in enumerate(zip(received, self._offsets, strict=True)):
            for name, lines in news.rows.items():
                if number == 0:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    with (self._folder / name).open("ab") as file:
                        file.write(lines)
                offsets[name] = offsets.get(name, 0) + len(lines)
        return received

    def _pass_on(self, requests: int) -> None:
        """Ask the stage to stop, as often as we were asked."""
        for _ in range(requests - self._stops_sent):
            for actor in self._actors:
                actor.stop.remote()
        self._stops_sent = max(requests, self._stops_sent)

    def _wait_for_checkpoint(self) -> None:
        until = time.monotonic() + CHECKPOINT_SECONDS
        while time.monotonic() < until and any(news.reply is None for news in self._news()):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End what still runs, and remove the workspaces."""
        with suppress(NodeLost):
            ask_all(self._actors, "close", [()] * len(self._actors))


def note_loss(folder: Path, watch: Watch) -> None:
    """What a lost machine cost is charged up to now, when its loss is noticed."""
    watch.look()
    if watch.attempt is not None and watch.attempt.event != "end":
        row = watch.attempt.model_copy(update={"event": "lost", "time": time.time()})
        jsonl.append(folder / "attempts.jsonl", row)


def _files_of(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Name -> text of those files that are there."""
    return {name: (root / name).read_text(encoding="utf-8") for name in names if (root / name).is_file()}


def _launch(number: int, facts: Sequence[Facts]) -> list[str]:
    """Options of the launcher on a node: where the processes of all nodes meet."""
    meet = f"{facts[0].address}:{facts[0].port}"
    return ["--nodes", str(len(facts)), "--node-rank", str(number), "--meet", meet] if len(facts) > 1 else []


def _worst(replies: Sequence[Reply]) -> Reply:
    """The reply that explains the others: bad input on one node makes the rest crash, and a crash stops the rest."""
    for kind in ("bad_input", "crashed", "stopped"):
        reply_of_kind = next((reply for reply in replies if reply.kind == kind), None)
        if reply_of_kind is not None:
            return reply_of_kind
    return replies[0]
