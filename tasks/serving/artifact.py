"""A benchmark started from the Prefect UI, and its result there."""

from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from config.errors import EnvironmentFault
from config.schema import Params
from config.workspace.benchmarked import Load
from costs.tables.price import usd_per_device_hour
from reporting.runs_named import resolve_one
from serving.bench.loads import LoadSpec
from serving.settings import Weights
from tasks.servers.processes import servers
from tasks.serving.bench import BenchResult, BenchSettings, bench
from tasks.stage.progress import Display
from tasks.ui.links import pages
from tracking.client import connect
from tracking.lineage import version_of
from tracking.rows import serving_line, serving_rows


@task(name="bench", cache_policy=NO_CACHE, persist_result=False)
def show_benchmark(
    params: Params, run: str, weights: Weights, slots: int, concurrency: list[int], seconds: float
) -> str:
    """Serve a run's model, measure it, and show the loads as a table; returns the knee in a line.

    Raises as `bench` does.
    """
    root, display = Path.cwd(), Display()
    loads = [LoadSpec(concurrency=number) for number in sorted(set(concurrency))]
    run_id = run if run == "champion" else resolve_one(root, run)
    settings = BenchSettings(run_id, loads=loads, seconds=seconds, weights=weights, slots=slots)

    def on_load(load: Load, remaining: int) -> None:
        display.say(f"concurrency {load.concurrency}: {load.tokens_per_second:.0f} tokens/s, {remaining} left")

    result = bench(root, params, settings, usd_per_device_hour(params), on_load)
    line = serving_line(result.benchmark) or "no load was measured"
    create_table_artifact(
        serving_rows(result.benchmark),
        key="serving",
        description=f"{result.model}: {line}. {_where(root, params, result)}",
    )
    return line


def _where(root: Path, params: Params, result: BenchResult) -> str:
    """A link to the model version in MLflow; without one, to the run."""
    if result.run_id is None:
        return ""
    mlflow = pages(root, params, servers(root), result.run_id)["mlflow"]
    name = params.tracking.registered_model
    try:
        version = version_of(connect(root, params.tracking), name, result.model_digest)
    except EnvironmentFault:
        version = None
    if version is None:
        return f"[Run in MLflow]({mlflow})"
    address = f"{mlflow.partition('/#/')[0]}/#/models/{name}/versions/{version}"
    return f"[{name} version {version} in MLflow]({address})"
