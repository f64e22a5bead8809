"""How a run appears in MLflow's tables and legends: its name, changes, origin and description."""

from collections.abc import Mapping
from pathlib import Path

from config.records import PICTURE, SUMMARY
from tracking.client import Connection

KIND_TAG = "rlhf.kind"
"""`run` or `stage`: a search can then find pipeline runs only."""
CHANGED_TAG = "rlhf.changed"
MOST_CHANGES = 6
MOST_CHARS = 60
"""Changes listed, and characters per value."""
OF_ITS_OWN = ("tracking.", "prices.date", "prices.source")
"""Parameters whose change is not worth a label."""
NOTE_CHARS = 8000
"""MLflow's limit for a tag."""


def nickname(run_id: str) -> str:
    """The last words of a run's id (20261121-182020-brave-otter): MLflow shows the time in its own column and cuts
    long names.
    """
    parts = run_id.split("-", 2)
    return parts[2] if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit() else run_id


def source(origin: Mapping[str, str]) -> dict[str, str]:
    """Tags for a run's origin, under MLflow's own names where it has a column for them."""
    commit = origin.get("git.commit")
    mlflow = {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": "rlhf run",
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }
    return {**origin, **mlflow} if origin else {}


def params_before(connection: Connection, start: float) -> dict[str, str] | None:
    """The parameters of the last run that began before `start` (seconds since the epoch); None if there is none."""
    query = f"tags.`{KIND_TAG}` = 'run' and attributes.start_time < {round(start * 1000)} and params.seed != ''"
    runs = connection.client.search_runs(
        [connection.experiment_id], query, order_by=["attributes.start_time DESC"], max_results=1
    )
    return dict(runs[0].data.params) if runs else None


def changes(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """The parameters in which a run differs from the one before it: `ppo.kl.coef: 0.05 → 0.1`."""
    if before is None:
        return "first run"
    keys = [
        key
        for key in dict.fromkeys([*now, *before])
        if before.get(key) != now.get(key) and not key.startswith(OF_ITS_OWN)
    ]
    if not keys:
        return "no parameter"
    named = [f"{key}: {_short(before.get(key))} → {_short(now.get(key))}" for key in keys[:MOST_CHANGES]]
    more = [f"{len(keys) - MOST_CHANGES} more"] if len(keys) > MOST_CHANGES else []
    return ", ".join([*named, *more])


def _short(value: str | None) -> str:
    shown = "–" if value is None else value
    return shown if len(shown) <= MOST_CHARS else f"{shown[: MOST_CHARS - 1]}…"


def description(mlflow_run_id: str, folder: Path) -> dict[str, str]:
    """The tag that MLflow shows as a run's description, from its summary; empty without one. The picture is the run's
    own artifact.
    """
    path = folder / SUMMARY
    if not path.exists():
        return {}
    # relative to MLflow's page, wherever it is served
    shown = path.read_text(encoding="utf-8").replace(
        f"]({PICTURE})", f"](get-artifact?path={PICTURE}&run_uuid={mlflow_run_id})"
    )
    # MLflow's tables have no padding between columns
    spaced = [line.replace(" | ", "&emsp; | ") if line.startswith("| ") else line for line in shown.splitlines()]
    return {"mlflow.note.content": "\n".join(spaced)[:NOTE_CHARS]}
