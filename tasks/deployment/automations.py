"""Automations of the Prefect server: they end runs whose process is gone, and notify a webhook about runs and
models.
"""

from datetime import timedelta
from typing import NamedTuple

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from tasks.servers.plans import POOL
from tasks.servers.prefect_settings import HEARTBEAT_SECONDS
from tasks.ui.events import PREFIX

WEBHOOK = "rlhf-notify"
"""Name of the block with the address."""
ZOMBIE = "Zombie"
"""Name of the state of a run whose process is gone; its type is Crashed."""
HEARTBEAT = "prefect.flow-run.heartbeat"
RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""Seconds after which a run counts as dead: three missed heartbeats."""
FINAL = ("Completed", "Failed", "Crashed", "Cancelled", "Stopped", "OverBudget", "Kept", "Promoted", "Skipped", ZOMBIE)
"""Names of the states a run ends in; Prefect names the event of a state after it."""
BODY = (
    '{"event": {{ event.event | tojson }}, "run": {{ event.resource.name | tojson }}, '
    '"text": {{ (event.event ~ " " ~ event.resource.name ~ ": " ~ (event.payload.message or '
    "event.payload.validated_state.message)) | tojson }}}"
)
"""The posted message; chat programs show `text`."""


class Notice(NamedTuple):
    """An event that a webhook is called for."""

    name: str
    events: frozenset[str]
    resources: str
    description: str


NOTICES = (
    Notice(
        "rlhf: run finished",
        frozenset({f"{PREFIX}.run.finished"}),
        f"{PREFIX}.run.*",
        "A run completed, with its verdict and cost.",
    ),
    Notice(
        "rlhf: run failed",
        frozenset({f"{PREFIX}.run.failed"}),
        f"{PREFIX}.run.*",
        "A run was refused or failed, with the reason.",
    ),
    Notice(
        "rlhf: run crashed",
        frozenset({"prefect.flow-run.Crashed", f"prefect.flow-run.{ZOMBIE}"}),
        "prefect.flow-run.*",
        "The process of a run exited without an error message.",
    ),
    Notice(
        "rlhf: run over budget",
        frozenset({f"{PREFIX}.run.over_budget"}),
        f"{PREFIX}.run.*",
        "A run stopped at its budget, resumably.",
    ),
    Notice(
        "rlhf: model promoted",
        frozenset({f"{PREFIX}.model.promoted"}),
        f"{PREFIX}.model.*",
        "A model became the champion.",
    ),
)


def automate(client: SyncPrefectClient, webhook_url: str | None) -> None:
    """Create or update the automations; whether they are enabled does not change.

    `webhook_url` becomes the address of the notices and switches them on; None leaves both as they are.
    """
    if webhook_url is not None:
        Webhook(url=webhook_url).save(WEBHOOK, overwrite=True)
    block = _webhook_id(client)
    follow_lives(client)
    for notice in NOTICES:
        _put(client, _notice_automation(notice, block), switch=True if webhook_url is not None else None)


def follow_lives(client: SyncPrefectClient) -> None:
    """Create or update the automations that tell runs whose process is gone from living ones."""
    for wanted in (silent_automation(), unstarted_automation(), living_automation()):
        _put(client, wanted, switch=None)


def silent_automation() -> AutomationCore:
    """Ends a run whose heartbeats have stopped, without anybody watching."""
    return AutomationCore(
        name="rlhf: zombie runs",
        description=f"Ends a run that sends no heartbeat for {SILENCE_SECONDS} s, so that the next one gets its slot.",
        trigger=_silence({HEARTBEAT}, {HEARTBEAT}),
        actions=[_to_zombie(f"No heartbeat for {SILENCE_SECONDS} s: its process is gone.")],
    )


def unstarted_automation() -> AutomationCore:
    """Ends a run that a worker of processes took and never started: the worker is gone. Workers of containers need
    longer, to pull an image.
    """
    trigger = _silence({"prefect.flow-run.Pending"}, {"prefect.flow-run.Running"})
    pool: dict[str, str | list[str]] = {"prefect.resource.role": "work-pool", "prefect.resource.name": [POOL]}
    return AutomationCore(
        name="rlhf: runs that never started",
        description=f"Ends a run that no worker of processes started for {SILENCE_SECONDS} s, so "
        "that the next one gets its slot.",
        trigger=trigger.model_copy(update={"match_related": ResourceSpecification(pool)}),
        actions=[_to_zombie(f"Pending for {SILENCE_SECONDS} s: its worker is gone.")],
    )


def living_automation() -> AutomationCore:
    """Sets a run back to Running that was ended for its silence, and sends heartbeats again: the server was away, or
    the machine slept.
    """
    trigger = EventTrigger(
        match=RUNS,
        after={f"prefect.flow-run.{ZOMBIE}"},
        expect={HEARTBEAT},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(days=1),
    )
    message = "It was taken for a zombie, and is alive."
    return AutomationCore(
        name="rlhf: living runs",
        description="Sets a run back to Running that was taken for a zombie.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.RUNNING, message=message, force=True)],
    )


def _silence(after: set[str], expected: set[str]) -> EventTrigger:
    """A run of which nothing more is heard."""
    return EventTrigger(
        match=RUNS,
        after=after,
        expect={*expected, *(f"prefect.flow-run.{name}" for name in FINAL)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_SECONDS),
    )


def _to_zombie(reason: str) -> ChangeFlowRunState:
    message = f"{reason} Start it again: it resumes from its checkpoint."
    return ChangeFlowRunState(state=StateType.CRASHED, name=ZOMBIE, message=message)


def _notice_automation(notice: Notice, block: object) -> AutomationCore:
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": [notice.resources]}),
        expect=set(notice.events),
        posture=Posture.Reactive,
        threshold=1,
    )
    action = CallWebhook.model_validate({"block_document_id": block, "payload": BODY}) if block else DoNothing()
    hint = "" if block else " Off until there is an address: rlhf up --notify URL."
    return AutomationCore(
        name=notice.name,
        description=notice.description + hint,
        trigger=trigger,
        actions=[action],
        enabled=block is not None,
    )


def _webhook_id(client: SyncPrefectClient) -> object:
    try:
        return client.read_block_document_by_name(WEBHOOK, "webhook").id
    except ObjectNotFound:
        return None


def _put(client: SyncPrefectClient, wanted: AutomationCore, switch: bool | None) -> None:
    """Create it, or update differences; `switch` None keeps it enabled or disabled."""
    same_name = client.read_automations_by_name(wanted.name)
    if not same_name:
        client.create_automation(wanted)
        return
    (current, *doubles) = same_name
    for double in doubles:
        client.delete_automation(double.id)
    wanted = wanted.model_copy(update={"enabled": current.enabled if switch is None else switch})
    if _core(current) != _core(wanted):
        client.update_automation(current.id, wanted)


def _core(automation: AutomationCore) -> dict[str, object]:
    """The definition of an automation; ids of triggers are assigned by the server."""
    fields = {"name", "description", "enabled", "actions"}
    trigger = automation.trigger.model_dump(mode="json", exclude={"id"})
    return {
        **automation.model_dump(mode="json", include=fields),
        "trigger": {key: _sorted(value) for key, value in trigger.items()},
    }


def _sorted(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, list) else value
