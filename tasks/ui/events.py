"""Prefect events about runs and models, which trigger automations.

rlhf.run.finished       completed, with its verdict and cost
rlhf.run.failed         refused or failed, with the reason
rlhf.run.stopped        asked to stop; resumable
rlhf.run.over_budget    stopped at its budget; resumable
rlhf.model.promoted     a model became the champion

The resource is `rlhf.run.<run id>` or `rlhf.model.<name>`; flow run, flow and deployment are related resources.
"""

from typing import Literal

from prefect.events import emit_event

RunEvent = Literal["finished", "failed", "stopped", "over_budget"]
PREFIX = "rlhf"


def run_event(what: RunEvent, run_id: str, message: str, **figures: float | str | None) -> None:
    """Emit the event of a pipeline run; `figures` name their unit, as `usd` and `seconds`. It cannot fail the run."""
    _emit(f"{PREFIX}.run.{what}", "run", run_id, message, figures)


def model_event(what: Literal["promoted"], model: str, message: str, **figures: float | str | None) -> None:
    """Emit the event of a registered model."""
    _emit(f"{PREFIX}.model.{what}", "model", model, message, figures)


def _emit(event: str, kind: str, name: str, message: str, figures: dict[str, float | str | None]) -> None:
    resource = {"prefect.resource.id": f"{PREFIX}.{kind}.{name}", "prefect.resource.name": name}
    emit_event(event, resource=resource, payload={"message": message, **figures})
