"""The form that fits on a screen: a recipe, and what to change of it, becomes a pipeline run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prefect.client.orchestration import get_client
from pydantic import BaseModel, Field

from config.compose import compose
from config.errors import EnvironmentFault, ParamsError
from config.load import read, validate
from config.schema import Params
from config.sections.where import DEFAULT, LOCAL

PIPELINE = "rlhf/rlhf"
"""The deployment whose form has every parameter; runs are started there."""
OF_THE_RECIPE = "as in the recipe"


class Change(BaseModel):
    """One parameter that is to be another than the recipe's."""

    key: str = Field(title="Parameter", description="Such as ppo.learning_rate.")
    value: str = Field(title="Value", description="As in params.yaml: 1e-4, true, null, [q, v].")


class Started(NamedTuple):
    name: str
    """Of the flow run, as Prefect made it up."""
    flow_run_id: str


def wanted_params(
    root: Path,
    prefilled: Mapping[str, Any],
    recipe: str,
    method: str,
    max_usd: float | None,
    seed: int | None,
    changes: Sequence[Change | Mapping[str, Any]],
) -> Params:
    """The recipe's params with what the form says laid over them.

    Where stages run and what tracks them is the server's business: they are those of `prefilled`,
    the parameters of the whole form, unless stages run beside the pipeline there too.

    Raises ParamsError in the words of the command line.
    """
    content = read(root / "recipes" / f"{recipe}.yaml")
    if prefilled["where"][DEFAULT]["pool"] != LOCAL:
        content["where"] = prefilled["where"]
    content["tracking"] = prefilled["tracking"]
    assigned = [] if method == OF_THE_RECIPE else [f"align.method={method}"]
    assigned += [] if max_usd is None else [f"budget.max_usd={max_usd}"]
    assigned += [] if seed is None else [f"seed={seed}"]
    assigned += [_assignment(change) for change in changes]
    return validate(compose(content, {}, assigned), "the form")


def _assignment(change: Change | Mapping[str, Any]) -> str:
    given = change.model_dump() if isinstance(change, Change) else change
    key, value = str(given.get("key") or "").strip(), given.get("value")
    if not key or "=" in key:
        raise ParamsError(
            f"changes: {key or 'a row without a parameter'} is no name of a parameter. Write one "
            "such as ppo.learning_rate in its first field, and the value in the second."
        )
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{key}={text.strip()}"


def prefilled() -> dict[str, Any]:
    """The parameters of the whole form, as it is deployed. Raises EnvironmentFault."""
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name(PIPELINE)
    if not isinstance(params := found.parameters.get("params"), dict):
        raise EnvironmentFault(
            f"the deployment {PIPELINE} has no params to start from. rlhf up deploys it again."
        )
    return params


def start_pipeline(params: Params) -> Started:
    """A run of the flow rlhf with these params, as if its whole form had been sent."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(PIPELINE)
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"params": params.model_dump(mode="json")}
        )
    return Started(run.name, str(run.id))
