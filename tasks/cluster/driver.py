"""The pipeline's side of a stage on nodes of a Ray cluster: place it, take its rows, pass on a stop, judge its end.

Only rows, parameters and locks pass through Ray, as return values. Data, models and checkpoints go to the DVC remote
and come from there; how long to wait, when to stop and what an end means is decided here and in the stage.
"""

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from config import jsonl
from config.atomic_file import write_atomically
from config.errors import EnvironmentFault, StageStopped, UserError
from config.inputs import reward_files
from config.load import dump as dump_params
from config.locks import CHECKPOINT_SECONDS
from config.sections.where import Place
from costs.tables.price import on_cpu
from tasks.cluster.node import LOWEST_FREE_BYTES, Facts, News, Node
from tasks.cluster.work import Reply
from tasks.dvc.inputs_stage import OUTS
from tasks.dvc.pull import remote_of, small_outputs
from tasks.dvc.reuse import reuse
from tasks.dvc.transfers import fetch, note_pushed, send_outputs
from tasks.run.changed_code import policy
from tasks.run.exchange import files_of
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.transient import persist
from tasks.run.workspace import lay_out
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.progress import Display, Watch
from tasks.stage.runner import Observer, record, require_same_params

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE, TOKEN_MODE_VARIABLE = "RAY_ADDRESS", "RAY_AUTH_MODE"
LABEL = "pool"
"""Label of the nodes of a pool: ray start --labels pool=gpus."""
POLL_SECONDS = 1.0
START_SECONDS = 1800.0
"""Longest wait for nodes: a cluster may first have to rent them."""
ANSWER_SECONDS = 60.0
"""Longest wait for the answer of an actor on a node that Ray takes for alive."""
STORE_PATIENCE_SECONDS = 240.0
PREEMPTIONS = 20
"""Times a stage goes on with other nodes after losing one, before that counts as a crash."""


class NodeLost(Exception):
    """A node, or the actor on it, is gone; the text says which."""


def is_cluster() -> bool:
    """Whether pools are those of a Ray cluster."""
    return ADDRESS_VARIABLE in os.environ


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
    place = run.params.where.of(stage)
    try:
        persist(lambda: send_outputs(run.root), lambda: stop.requested, STORE_PATIENCE_SECONDS)
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"{stage} is placed on {place.pool} and cannot get its inputs: {fault}") from None
    with connected(run.root):
        for _ in range(PREEMPTIONS):
            budget = BudgetWatch(run, stage, local=False)
            budget.refuse_without_room()
            with crew(run, stage, place, stop) as placed:
                reply = placed.follow(stop, budget, observe)
            if reply.kind != "stopped" or stop.requested or budget.reached is not None:
                break
            logger.warning("%s has lost its node: %s Going on with another one.", stage, reply.message)
    return outcome_of(run, reply, budget, stop)


def outcome_of(run: Run, reply: Reply, budget: BudgetWatch, stop: StopRequest) -> Outcome:
    """What the reply of a placed stage means for the run. Raises UserError, StageStopped, OverBudget, StageCrashed."""
    match reply.kind:
        case "done":
            take_lock(run.root, reply.lock)
            return Outcome(cached=reply.cached, attempt=reply.attempt)
        case "bad_input":
            raise UserError(reply.message)
        case "stopped" if budget.reached is not None and not stop.requested:
            raise budget.over(reply.message)
        case "stopped":
            raise StageStopped(reply.message)
        case _:
            raise StageCrashed(reply.message, reply.hopeless)


def take_lock(root: Path, lock: str) -> None:
    """Put the dvc.lock in place that a stage on another node came back with."""
    write_atomically(root / "dvc.lock", lock)
    # what was here was pushed before the stage was handed over, and who did it has pushed the rest
    note_pushed(root)


# ---------------------------------------------------------------- the cluster


@contextmanager
def connected(root: Path) -> Iterator[None]:
    """Be a driver of the cluster at RAY_ADDRESS, which gets the code of this process.

    Raises EnvironmentFault if it cannot be reached, or lets in whoever reaches it: Ray's ports run commands.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = os.environ[ADDRESS_VARIABLE]
    if os.environ.get(TOKEN_MODE_VARIABLE) != "token":
        raise EnvironmentFault(
            f"{TOKEN_MODE_VARIABLE} is not token, and Ray's ports run commands for whoever reaches them. Start the "
            "cluster and rlhf with RAY_AUTH_MODE=token, and the same token in the file that RAY_AUTH_TOKEN_PATH names."
        )
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own there
    with tempfile.TemporaryDirectory(prefix="rlhf-code-") as folder:
        code = Path(folder) / "code"
        lay_out(code, remote_of(root))
        try:
            ray.init(
                address, runtime_env={"working_dir": str(code)}, namespace="rlhf", log_to_driver=False,
                logging_level=logging.WARNING, ignore_reinit_error=True,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 # of any of its parts
            reason = " ".join(str(error).split())[:200]
            raise EnvironmentFault(
                f"the Ray cluster at {ADDRESS_VARIABLE}={address} cannot be reached ({reason}). Check the address, "
                "the token (RAY_AUTH_TOKEN_PATH), and that Ray and Python are of one version everywhere."
            ) from None
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, before)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def crew(run: Run, stage: str, place: Place, stop: StopRequest) -> Iterator["Crew"]:
    """An actor on each node that the stage is placed on. Raises EnvironmentFault if the nodes are not there in time,
    or one of them cannot do it.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    processes = place.processes // place.nodes
    bundle = {"CPU": processes} | ({} if on_cpu(run.params, stage) else {"GPU": processes})
    group = placement_group(
        [bundle] * place.nodes,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{LABEL: place.pool}] * place.nodes,
        name=f"{run.run_id} {stage}",
    )
    try:
        _wait_until_there(group, place, bundle, stop)
        actors = [
            ray.remote(Node).options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            for number in range(place.nodes)
        ]  # fmt: skip
        placed = Crew(run, stage, actors)
        try:
            yield placed
        finally:
            placed.close()
    finally:
        remove_placement_group(group)


def _wait_until_there(group: Any, place: Place, bundle: Mapping[str, int], stop: StopRequest) -> None:
    """Wait until the nodes are there. Raises StageStopped, or EnvironmentFault that says what is missing."""
    import ray

    until, ready = time.monotonic() + START_SECONDS, group.ready()
    while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
        if stop.requested:
            raise StageStopped("asked to stop before its nodes were there: run again to go on from there.")
        if time.monotonic() > until:
            raise EnvironmentFault(
                f"pool {place.pool}: {_lacking(place, bundle, ray.nodes())}. Waited {START_SECONDS / 60:.0f} min."
            )


def _lacking(place: Place, bundle: Mapping[str, int], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why a stage has no place on the nodes of the cluster."""
    label = f"{LABEL}={place.pool}"
    labelled = [node for node in nodes if node["Alive"] and node["Labels"].get(LABEL) == place.pool]
    if not labelled:
        return f"no node of the Ray cluster has the label {label} (ray start --labels {label})"
    needed = " and ".join(f"{count} {name}" for name, count in bundle.items())
    held = "; ".join(", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle) for node in labelled)
    return f"nodes={place.nodes} with {needed} each, and those with the label {label} have {held} (in use or not)"


class Crew:
    """The nodes of a placed stage, from the request to the reply."""

    def __init__(self, run: Run, stage: str, actors: Sequence[Any]) -> None:
        """Ask the nodes who they are, and start the stage's process on each."""
        self._run, self._stage, self._actors = run, stage, actors
        self._folder = run.root / "runs" / stage
        self._stops_sent = 0
        identity = f"{stage}-{uuid.uuid4().hex[:8]}"
        facts = self._ask_all("facts", [()] * len(actors))
        for number, fact in enumerate(facts):
            _require_fit(number, fact)
        texts = files_of(run.root, ["dvc.lock", *map(str, OUTS), f"runs/{stage}/attempts.jsonl",
                                    *reward_files(run.root, run.params)])  # fmt: skip
        texts["params.yaml"] = dump_params(run.params)
        self._offsets = [
            {"attempts.jsonl": len(texts.get(f"runs/{stage}/attempts.jsonl", "").encode())} for _ in actors
        ]
        requests = [
            {
                "id": f"{identity}-{number}", "run_id": run.run_id, "stage": stage, "node": number,
                "launch": _launch(number, facts),
                "changed_code": policy(), "remote": remote_of(run.root),
            }
            for number in range(len(actors))
        ]  # fmt: skip
        self._ask_all("start", [(request, texts) for request in requests])

    def follow(self, stop: StopRequest, budget: BudgetWatch, observe: Observer) -> Reply:
        """Copy rows to runs/<stage>/ and pass on requests to stop until the stage has ended on every node."""
        watch = Watch(self._run.root, self._run.params, self._stage)
        replies: list[bytes | None] = [None] * len(self._actors)
        try:
            while None in replies:
                replies = [news.reply for news in self._news()]
                observe(watch.look())
                self._pass_on(max(stop.requests, int(budget.look(watch))))
                time.sleep(POLL_SECONDS if None in replies else 0.0)
        except NodeLost as lost:
            note_loss(self._folder, watch)
            return Reply("stopped", str(lost))
        except BaseException:
            self._pass_on(1)
            with suppress(NodeLost):
                self._wait_for_checkpoint()
            raise
        observe(watch.look())
        return _worst([Reply.of(reply) for reply in replies if reply is not None])

    def _news(self) -> list[News]:
        """What is new on every node, written here."""
        received: list[News] = self._ask_all("news", [(offsets,) for offsets in self._offsets])
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
            self._ask_all("close", [()] * len(self._actors))

    def _ask_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a method of each actor returns. Raises NodeLost."""
        import ray

        calls = [getattr(actor, method).remote(*given) for actor, given in zip(self._actors, arguments, strict=True)]
        try:
            return list(ray.get(calls, timeout=ANSWER_SECONDS))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise NodeLost(f"{self._stage}: {' '.join(str(error).split())[:200]}") from None


def note_loss(folder: Path, watch: Watch) -> None:
    """What a lost machine cost is charged up to now, when its loss is noticed."""
    watch.look()
    if watch.attempt is not None and watch.attempt.event != "end":
        row = watch.attempt.model_copy(update={"event": "lost", "time": time.time()})
        jsonl.append(folder / "attempts.jsonl", row)


def _launch(number: int, facts: Sequence[Facts]) -> list[str]:
    """Options of the launcher on a node: where the processes of all nodes meet."""
    meet = f"{facts[0].address}:{facts[0].port}"
    return ["--nodes", str(len(facts)), "--node-rank", str(number), "--meet", meet] if len(facts) > 1 else []


def _require_fit(number: int, facts: Facts) -> None:
    """Raise EnvironmentFault for a node that cannot do a stage."""
    if not facts.with_token:
        raise EnvironmentFault(
            f"node {number} runs Ray without a token, so that whoever reaches its ports runs commands there. Start it "
            "with RAY_AUTH_MODE=token."
        )
    if facts.free_bytes < LOWEST_FREE_BYTES:
        raise EnvironmentFault(
            f"{facts.free_bytes / 2**30:.1f} GiB are free at {facts.folder} on node {number}, "
            f"{LOWEST_FREE_BYTES / 2**30:.0f} are needed at least. Free some space there, or set RLHF_WORKSPACES on "
            "that node to a folder on a larger disk."
        )


def _worst(replies: Sequence[Reply]) -> Reply:
    """The reply that explains the others: bad input on one node makes the rest crash, and a crash stops the rest."""
    for kind in ("bad_input", "crashed", "stopped"):
        reply_of_kind = next((reply for reply in replies if reply.kind == kind), None)
        if reply_of_kind is not None:
            return reply_of_kind
    return replies[0]
