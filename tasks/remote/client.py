"""The pipeline's side of a stage on a work pool: submit it, follow its rows, stop it, take the new dvc.lock."""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from config.errors import EnvironmentFault, StageStopped
from config.sections.where import LOCAL
from tasks.cluster.driver import PREEMPTIONS, STORE_PATIENCE_SECONDS, is_cluster, note_loss, outcome_of
from tasks.cluster.work import Reply
from tasks.dvc.pull import inputs_of, remote_of, small_outputs
from tasks.dvc.reuse import reuse
from tasks.dvc.transfers import fetch, send_outputs
from tasks.planning.placement_check import on_volumes
from tasks.remote import heartbeat
from tasks.remote.heartbeat import PIPELINE, Heartbeat
from tasks.remote.pools import require_served, state_of, submit, withdraw
from tasks.remote.recovery import ask_to_stop, recover_abandoned, remove_exchange
from tasks.remote.worker import STOP, request_of
from tasks.run.exchange import REPLY, REQUEST, Exchange, Receiver, dump
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.transient import kind_of, persist
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.outcome import Outcome
from tasks.stage.progress import Display, Watch
from tasks.stage.runner import Observer, record, require_same_params, run_stage

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STATE_EVERY_SECONDS = 3.0
START_PATIENCE_SECONDS = 1800.0
"""Seconds for a container to start: a cluster may first have to start a machine."""
CHECK_PATIENCE_SECONDS = 600.0

Result = TypeVar("Result")


def place_of(run: Run, stage: str) -> str:
    """`local`, or the work pool that the stage is placed on."""
    return run.params.where.of(stage).pool


def run_remote(run: Run, stage: str, pool: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Bring the outputs of `stage` up to date in a container of `pool`; as `tasks.stage.runner.run_stage`, which does
    it here.

    Raises UserError, StageStopped, OverBudget, StageCrashed.
    """
    require_same_params(run, stage)
    _patiently(lambda: recover_abandoned(run, stage, stop), stop)
    if stop.requested:
        raise StageStopped(
            f"Stopped before {stage}, as asked. Everything before it is kept: run again to resume there."
        )
    if reuse(run.root, run.params, stage, Display().say, placed=True):
        outcome = Outcome(cached=True, attempt=None)
    else:
        outcome = _in_containers(run, stage, pool, stop, observe)
    _patiently(lambda: fetch(run.root, small_outputs(run.root, stage)), stop)
    return record(run, stage, outcome)


def _patiently(action: Callable[[], Result], stop: StopRequest) -> Result:
    """Retry an operation on the store before or after a stage; a temporary outage is not an error."""
    return persist(action, lambda: stop.requested, STORE_PATIENCE_SECONDS)


def run_locally(run: Run, stage: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Like `tasks.stage.runner.run_stage` if other stages may run elsewhere: their outputs are then in the remote
    alone.
    """
    require_same_params(run, stage)
    try:
        recover_abandoned(run, stage, stop)  # an earlier run may have placed it
    except EnvironmentFault as fault:
        logger.warning("whether an earlier run has left %s running cannot be seen: %s", stage, fault)
    if not remote_stages(run):
        return run_stage(run, stage, stop, observe)
    if not stop.requested and reuse(run.root, run.params, stage, Display().say, placed=True):
        _patiently(lambda: fetch(run.root, small_outputs(run.root, stage)), stop)
        return record(run, stage, Outcome(cached=True, attempt=None))
    _patiently(lambda: fetch(run.root, inputs_of(run.root, stage)), stop)
    return run_stage(run, stage, stop, observe)


def remote_stages(run: Run) -> list[str]:
    """Stages of this run that are placed on a work pool."""
    return [stage for stage in run.params.stages if place_of(run, stage) != LOCAL]


def fetch_aligned(run: Run) -> None:
    """Bring the model that the run is about, to be registered; of an adapter also its base, where that is the SFT
    model.

    Raises EnvironmentFault if the remote does not give it.
    """
    method = run.params.align.method
    if remote_stages(run):
        on_sft = run.params.section(method).lora is not None and run.params.sft.lora is None
        fetch(run.root, [f"models/{method}", *(["models/sft"] if on_sft else [])])


def _in_containers(run: Run, stage: str, pool: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Run in one container, or in several if they are taken away."""
    try:
        _patiently(lambda: send_outputs(run.root), stop)
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"{stage} is placed on {pool} and cannot get its inputs: {fault}") from None
    for _ in range(PREEMPTIONS):
        BudgetWatch(run, stage, local=False).refuse_without_room()
        # what fails is the request: it comes before the hand-over
        placed = _patiently(lambda: RemoteStage(run, stage, pool), stop)
        reply = placed.follow(stop, observe)
        if reply.kind != "stopped" or stop.requested or placed.budget.reached is not None:
            break
        logger.warning("%s was taken away from its container: %s Going on in a new one.", stage, reply.message)
        placed.close()
    try:
        return outcome_of(run, reply, placed.budget, stop)
    finally:
        placed.close()


class RemoteStage:
    """A stage in its own container, from the request to the reply."""

    def __init__(self, run: Run, stage: str | None, pool: str, volumes: dict[str, str] | None = None) -> None:
        """Write the request and hand it to the pool. Stage None only checks the pool's container, and what is mounted
        there.
        """
        self.run, self._stage, self._pool = run, stage, pool
        self._name = f"{stage or 'check'}-{uuid.uuid4().hex[:8]}"
        remote = remote_of(run.root)
        self._exchange = Exchange(f"{remote['url']}/exchange/{run.run_id}/{self._name}")
        self._exchange.write(REQUEST, dump(request_of(run, stage, pool, self._name, remote, volumes)))
        self._receiver = Receiver(run.root / "runs" / (stage or "check"), self._exchange)
        self._flow_run = submit(pool, self._exchange.url, f"{self._name} of {run.run_id}")
        self._state: Any = None
        self._asked_at = 0.0
        self._stop_requests_sent = 0
        self._sign = Heartbeat(self._exchange, PIPELINE, heartbeat.EVERY_SECONDS)
        self._heard_at = time.monotonic()

    def follow(self, stop: StopRequest, observe: Observer) -> Reply:
        """Copy rows to runs/<stage>/ and pass on requests to stop until the stage has ended. A stage that leaves no
        reply has crashed.
        """
        assert self._stage is not None
        self.budget = BudgetWatch(self.run, self._stage, local=False)
        watch = Watch(self.run.root, self.run.params, self._stage)
        began = time.monotonic()
        try:
            while not self._ended():
                self._exchange_news(stop, watch)
                observe(watch.look())
                if stop.requested and self._is_waiting():
                    return self._withdrawn()
                if watch.attempt is None and time.monotonic() - began > START_PATIENCE_SECONDS:
                    raise EnvironmentFault(self._never_began(START_PATIENCE_SECONDS))
                time.sleep(POLL_SECONDS)
        except BaseException:
            with suppress(EnvironmentFault):  # else it hears of our end by our silence
                self._exchange.write(STOP, b"1")
            raise
        # it has ended: its rows and its reply are waited for as long as it takes
        persist(self._receiver.receive, lambda: stop.requested)
        observe(watch.look())
        reply = persist(self._reply, lambda: stop.requested)
        note_loss(self.run.root / "runs" / self._stage, watch)
        return reply

    def close(self) -> None:
        """Remove the exchanged files once the reply has been acted upon; a run that is killed earlier finds them
        again.
        """
        remove_exchange(self._exchange)

    def _is_waiting(self) -> bool:
        """Whether nothing is running yet: no worker has taken it, or its machine or image is still awaited."""
        return self._state is not None and (self._state.is_scheduled() or self._state.is_pending())

    def _withdrawn(self) -> Reply:
        """Should it start all the same, it finds no request and ends."""
        withdraw(self._flow_run.id)
        self._exchange.remove("")
        return Reply(
            "stopped", f"{self._stage} was asked to stop before its container began: run again to go on from there."
        )

    def _exchange_news(self, stop: StopRequest, watch: Watch) -> None:
        """Take its rows, show that we are there, pass on a request to stop. A store that is away for a while is no
        end.
        """
        try:
            self._receiver.receive()
            self._sign.show()
            requests = max(stop.requests, int(self.budget.look(watch)))
            if requests > self._stop_requests_sent:
                self._exchange.write(STOP, str(requests).encode())
                self._stop_requests_sent = requests
            self._heard_at = time.monotonic()
        except EnvironmentFault as fault:
            if time.monotonic() - self._heard_at > STORE_PATIENCE_SECONDS:
                raise
            logger.warning("%s Asking again.", fault)

    def check(self) -> str:
        """The pool container's description of itself. Raises EnvironmentFault if it cannot run a stage."""
        began = time.monotonic()
        while not self._ended():
            if time.monotonic() - began > CHECK_PATIENCE_SECONDS:
                raise EnvironmentFault(self._never_began(CHECK_PATIENCE_SECONDS))
            time.sleep(POLL_SECONDS)
        reply = self._reply()
        self.close()
        if reply.kind != "ready":
            raise EnvironmentFault(f"work pool {self._pool} cannot run any stage: {reply.message}")
        return reply.message

    def _ended(self) -> bool:
        """Asked of Prefect every few seconds; a server that is away for a while is no end."""
        if time.monotonic() - self._asked_at >= STATE_EVERY_SECONDS:
            self._asked_at = time.monotonic()
            try:
                self._state = state_of(self._flow_run.id)
            except httpx.HTTPError as error:
                if kind_of(error) != "transient":
                    raise
                logger.warning("the Prefect server does not answer (%s): asking again", type(error).__name__)
        return self._state is not None and self._state.is_final()

    def _reply(self) -> Reply:
        content = self._exchange.read(REPLY)
        if content is not None:
            return Reply.of(content)
        reason = " ".join(str(self._state.message or "no reason given").split())
        return Reply(
            "crashed",
            f"{self._stage or 'the check'} on work pool {self._pool} ended as {self._state.name} "
            f"without a reply: {reason}",
        )

    def _never_began(self, seconds: float) -> str:
        name = self._state.name if self._state else "unknown"
        return (
            f"{self._name} did not begin on work pool {self._pool} within {seconds / 60:.0f} "
            f"minutes (Prefect has it as {name}). "
            "See what its worker says: image, resources, rights."
        )


def check_placement(run: Run, stages: Sequence[str]) -> None:
    """See that every pool that one of `stages` is placed on can do it, before anything is paid for.

    Raises EnvironmentFault with the first one that cannot: no pool, no worker, no image, no GPU, no store, other code.
    """
    if is_cluster():
        return
    places = {
        place_of(run, stage): run.params.where.key(stage, "pool")
        for stage in reversed(stages)
        if place_of(run, stage) != LOCAL
    }
    for pool, key in places.items():
        require_served(pool, key)
    ask_to_stop(run)
    checks = {pool: RemoteStage(run, None, pool, on_volumes(run.root, run.params, pool, stages)) for pool in places}
    for pool, check in checks.items():
        logger.info("work pool %s: %s", pool, check.check())
