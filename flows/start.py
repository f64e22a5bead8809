"""The flow `start`: starts the pipeline from a form that fits on a screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.urls import url_for

from config.errors import RlhfError
from config.methods.registry import METHODS
from tasks.deployment.short_form import OF_THE_RECIPE, Change, prefilled, start_pipeline, wanted_params

if TYPE_CHECKING:
    Choice = str
else:
    Choice = Literal["as in the recipe", *METHODS]


@flow(name="start", persist_result=False, validate_parameters=False)
def start(
    recipe: Literal[
        "demo",
        "demo-distill",
        "demo-lora",
        "gpu-24gb",
        "gpu-80gb",
        "gsm8k-cpu",
        "node-8gpu",
        "smollm-cpu",
        "smollm-distill",
        "smollm-votes",
        "trees-cpu",
        "two-nodes",
        "votes-cpu",
    ] = "demo",
    method: Choice = "as in the recipe",
    max_usd: float | None = None,
    seed: int | None = None,
    changes: list[Change] | None = None,
) -> State[Any]:
    """Start the pipeline with a recipe and a few changes. The form of `rlhf` has every parameter.

    Args:
        recipe: What to run, from the folder recipes.
        method: How the model is aligned.
        max_usd: Most that the run may cost; it stops resumably there. Empty takes the recipe's.
        seed: Of data, initial weights and sampling. Empty takes the recipe's.
        changes: Further parameters, one a row, as `--set` has them on the command line.
    """
    try:
        params = wanted_params(Path.cwd(), prefilled(), recipe, method or OF_THE_RECIPE, max_usd, seed, changes or [])
    except RlhfError as error:
        return Failed(message=str(error))
    run = start_pipeline(params)
    return Completed(name="Started", message=f"{run.name}: {url_for('flow-run', run.flow_run_id)}")
