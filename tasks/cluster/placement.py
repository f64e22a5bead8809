"""Where the stages of a run have their place: here, or on nodes of a Ray cluster; whether those can do it, and what
comes back from them.
"""

import logging
import os
from collections.abc import Iterator, Sequence

from config.errors import EnvironmentFault
from config.sections.where import LOCAL
from tasks.cluster.driver import STORE_PATIENCE_SECONDS
from tasks.cluster.nodes import ADDRESS_VARIABLE, START_SECONDS, NodeLost, actors, connected
from tasks.dvc.pull import inputs_of, small_outputs
from tasks.dvc.reuse import reuse
from tasks.dvc.transfers import fetch
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.transient import persist
from tasks.stage.outcome import Outcome
from tasks.stage.progress import Display
from tasks.stage.runner import Observer, record, require_same_params, run_stage

logger = logging.getLogger(__name__)


def placed_stages(run: Run, stages: Sequence[str]) -> list[str]:
    """Those of `stages` that are placed on a pool."""
    return [stage for stage in stages if run.params.where.of(stage).pool != LOCAL]


def run_here(run: Run, stage: str, stop: StopRequest, observe: Observer) -> Outcome:
    """Like `tasks.stage.runner.run_stage` if other stages may run elsewhere: their outputs are then in the remote
    alone.
    """
    require_same_params(run, stage)
    if not placed_stages(run, run.params.stages):
        return run_stage(run, stage, stop, observe)

    def bring(paths: Sequence[str]) -> None:
        persist(lambda: fetch(run.root, paths), lambda: stop.requested, STORE_PATIENCE_SECONDS)

    if not stop.requested and reuse(run.root, run.params, stage, Display().say, placed=True):
        bring(small_outputs(run.root, stage))
        return record(run, stage, Outcome(cached=True, attempt=None))
    bring(inputs_of(run.root, stage))
    return run_stage(run, stage, stop, observe)


def fetch_aligned(run: Run) -> None:
    """Bring the model that the run is about, to be registered; of an adapter also its base, where that is the SFT
    model.

    Raises EnvironmentFault if the remote does not give it.
    """
    method = run.params.align.method
    if placed_stages(run, run.params.stages):
        on_sft = run.params.section(method).lora is not None and run.params.sft.lora is None
        fetch(run.root, [f"models/{method}", *(["models/sft"] if on_sft else [])])


def check_pools(run: Run, stages: Sequence[str], stop: StopRequest) -> None:
    """See that the nodes of every pool that one of `stages` is placed on can do it, before anything is paid for.

    Raises EnvironmentFault.
    """
    for pool, nodes in look_at_pools(run, stages, stop, START_SECONDS):
        logger.info("pool %s: %s", pool, "; ".join(nodes))


def look_at_pools(
    run: Run, stages: Sequence[str], stop: StopRequest, patience_seconds: float
) -> Iterator[tuple[str, list[str]]]:
    """Each pool that one of `stages` is placed on, and what its nodes say of themselves.

    Raises EnvironmentFault with the first one that cannot do it: no cluster, no node, no GPU, no store, a full disk.
    """
    where = run.params.where
    largest: dict[str, str] = {}
    placed = placed_stages(run, stages)
    for stage in sorted(placed, key=lambda stage: (where.of(stage).nodes, where.of(stage).processes)):
        largest[where.of(stage).pool] = stage
    for stage in largest.values():
        if ADDRESS_VARIABLE not in os.environ:
            raise EnvironmentFault(
                f"{where.key_and_value(stage, 'pool')} is a pool of a Ray cluster, and {ADDRESS_VARIABLE} does not "
                f"name one: docs/deploy.md. Set it, or {where.key(stage, 'pool')}: local."
            )
    with connected(run.root):
        for pool, stage in largest.items():
            try:
                with actors(run, stage, stop, patience_seconds) as (_, facts):
                    yield pool, [fact.about for fact in facts]
            except NodeLost as lost:
                raise EnvironmentFault(f"pool {pool} cannot run {stage}: {lost}") from None
