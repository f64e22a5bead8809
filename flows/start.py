"""The flow `start`: starts the pipeline from a form that fits on a screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.urls import url_for

from config.compose import recipe_names
from config.errors import RlhfError
from config.methods.registry import METHODS
from tasks.deployment.short_form import OF_THE_RECIPE, Change, prefilled, start_pipeline, wanted_params

if TYPE_CHECKING:
    Recipe = str
    Choice = str
else:
    Recipe = Literal[*recipe_names()]
    Choice = Literal[OF_THE_RECIPE, *METHODS]


@flow(name="start", persist_result=False, validate_parameters=False)
def start(
    recipe: Recipe = "demo",
    method: Choice = OF_THE_RECIPE,
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
