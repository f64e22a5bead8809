"""The flow `serve-bench`: speed of a run's model under load, and the price of a million tokens."""

from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from config.errors import RlhfError
from config.schema import Params
from tasks.planning.gate import checked
from tasks.serving.artifact import show_benchmark


@flow(name="serve-bench", persist_result=False, validate_parameters=False)
def serve_bench(
    params: Params,
    run: str = "last",
    weights: Literal["f32", "q8_0", "q4_0"] = "f32",
    slots: int = 16,
    concurrency: list[int] | None = None,
    seconds: float = 10.0,
) -> State[Any]:
    """Serve the model of a run and measure it under load; the result is a table, and goes to the model version in
    MLflow.

    Args:
        params: For the held-out prompts, the longest reply and the price of an hour.
        run: Whose model, by id, last, last-1, ..., or champion.
        weights: Which GGUF file of its export llama.cpp loads.
        slots: Replies that are generated side by side.
        concurrency: Concurrent requests, one load each. Empty is 1, 2, 4, 8, 16.
        seconds: How long each load lasts.
    """
    try:
        line = show_benchmark(checked(params), run, weights, slots, concurrency or [1, 2, 4, 8, 16], seconds)
    except RlhfError as error:
        return Failed(message=str(error))
    return Completed(name="Measured", message=line)
