"""Nodes of a Ray cluster for a stage: reach the cluster, wait for nodes with the label of its pool, ask them who they
are.
"""

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from config.errors import EnvironmentFault, StageStopped
from config.sections.where import Place
from costs.tables.price import on_cpu
from reporting.numbers import duration
from tasks.cluster.node import Facts, Node
from tasks.dvc.pull import remote_of
from tasks.planning.placement_check import on_volumes
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.workspace import lay_out
from tasks.stage.progress import Display

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE, TOKEN_MODE_VARIABLE = "RAY_ADDRESS", "RAY_AUTH_MODE"
LABEL = "pool"
"""Label of the nodes of a pool: ray start --labels pool=gpus."""
POLL_SECONDS = 1.0
SAY_SECONDS = 10.0
"""After this long the wait for nodes is explained."""
START_SECONDS = 1800.0
"""Longest wait for nodes: a cluster may first have to rent them."""
ANSWER_SECONDS = 180.0
"""Longest wait for the answer of an actor on a node that Ray takes for alive."""


class NodeLost(Exception):
    """A node, or the actor on it, is gone; the text says which."""


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
def actors(
    run: Run, stage: str, stop: StopRequest, patience_seconds: float
) -> Iterator[tuple[list[Any], list[Facts]]]:
    """An actor on each node that the stage is placed on, and what it says of its node.

    Raises EnvironmentFault if the nodes are not there in time, or one of them cannot do it; StageStopped; NodeLost.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = run.params.where.of(stage)
    processes = place.processes // place.nodes
    bundle = {"CPU": processes} | ({} if on_cpu(run.params, stage) else {"GPU": processes})
    group = placement_group(
        [bundle] * place.nodes,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{LABEL: place.pool}] * place.nodes,
        name=f"{run.run_id} {stage}",
    )
    try:
        _wait_until_there(group, place, bundle, stop, patience_seconds)
        started = [
            ray.remote(Node).options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            for number in range(place.nodes)
        ]  # fmt: skip
        volumes = on_volumes(run.root, run.params, place.pool, run.params.stages)
        facts: list[Facts] = ask_all(started, "facts", [(remote_of(run.root)["url"], volumes)] * place.nodes)
        for fact in facts:
            if fact.unfit:
                raise EnvironmentFault(
                    f"the node {fact.address} of pool {place.pool} cannot run a stage: {fact.unfit}"
                )
        yield started, facts
    finally:
        remove_placement_group(group)


def ask_all(started: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a method of each actor returns. Raises NodeLost."""
    import ray

    calls = [getattr(actor, method).remote(*given) for actor, given in zip(started, arguments, strict=True)]
    try:
        return list(ray.get(calls, timeout=ANSWER_SECONDS))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise NodeLost(" ".join(str(error).split())[:200]) from None


def leaving(facts: Sequence[Facts]) -> bool:
    """Whether one of the nodes is being drained: by a spot notice, ray drain-node, or a container that is stopped."""
    from ray._private.state import state  # as Ray Train asks

    return bool({fact.node_id for fact in facts} & set(state.get_draining_nodes()))


def _wait_until_there(
    group: Any, place: Place, bundle: Mapping[str, int], stop: StopRequest, patience_seconds: float
) -> None:
    """Wait until the nodes are there. Raises StageStopped, or EnvironmentFault that says what is missing."""
    import ray

    began, ready, said = time.monotonic(), group.ready(), False
    while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
        waited = time.monotonic() - began
        if stop.requested:
            raise StageStopped("asked to stop before its nodes were there: run again to go on from there.")
        if waited > patience_seconds:
            raise EnvironmentFault(
                f"pool {place.pool}: {_lacking(place, bundle, ray.nodes())}. Waited {duration(patience_seconds)}."
            )
        if waited > SAY_SECONDS and not said:
            said = True
            message = f"waiting for pool {place.pool}: {_lacking(place, bundle, ray.nodes())}"
            logger.warning("%s", message)
            Display().say(message)


def _lacking(place: Place, bundle: Mapping[str, int], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why a stage has no place on the nodes of the cluster."""
    label = f"{LABEL}={place.pool}"
    labelled = [node for node in nodes if node["Alive"] and node["Labels"].get(LABEL) == place.pool]
    if not labelled:
        return f"no node of the Ray cluster has the label {label} (ray start --labels {label})"
    needed = " and ".join(f"{count} {name}" for name, count in bundle.items())
    held = "; ".join(", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle) for node in labelled)
    return f"nodes={place.nodes} with {needed} each, and those with the label {label} have {held} (in use or not)"
