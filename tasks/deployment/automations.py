"""What the Prefect server does by itself: end runs that send no heartbeat, and tell a webhook
what became of a run or a model.
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

from tasks.servers.plans import HEARTBEAT_SECONDS
from tasks.servers.zombies import GO_ON, ZOMBIE
from tasks.ui.events import PREFIX

WEBHOOK = "rlhf-notify"
"""Name of the block that has the address."""
SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""After it a run counts as dead: three heartbeats in a row are missing."""
FINAL = (
    "Completed",
    "Failed",
    "Crashed",
    "Cancelled",
    "Stopped",
    "OverBudget",
    "Kept",
    "Promoted",
    "Skipped",
    ZOMBIE,
)
"""Names of the states a run ends in; Prefect names the event of a state after it."""
BODY = (
    '{"event": {{ event.event | tojson }}, "run": {{ event.resource.name | tojson }}, '
    '"text": {{ (event.event ~ " " ~ event.resource.name ~ ": " ~ (event.payload.message or '
    "event.payload.validated_state.message)) | tojson }}}"
)
"""What is posted; `text` is what chat programs show."""


class Notice(NamedTuple):
    """Something that a webhook is called for."""

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
    """Make the automations, or bring them up to date; whether one is switched on stays as it was.

    `webhook_url` becomes the address of the notices and switches them on; None leaves both as they
    are.
    """
    if webhook_url is not None:
        Webhook(url=webhook_url).save(WEBHOOK, overwrite=True)
    block = _webhook_id(client)
    end_silent_runs(client)
    for notice in NOTICES:
        _put(
            client,
            _notice_automation(notice, block),
            switch=True if webhook_url is not None else None,
        )


def end_silent_runs(client: SyncPrefectClient) -> None:
    """Make the automation on runs without a heartbeat alone, or bring it up to date."""
    _put(client, zombie_automation(), switch=None)


def zombie_automation() -> AutomationCore:
    """Nobody has to look: it fails a run whose heartbeats have stopped."""
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{name}" for name in FINAL)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_SECONDS),
    )
    message = (
        f"No heartbeat for {SILENCE_SECONDS} s: the process, or the machine it was on, is gone. "
        f"{GO_ON}"
    )
    return AutomationCore(
        name="rlhf: zombie runs",
        description=f"Ends a run that sends no heartbeat for {SILENCE_SECONDS} s, so that the "
        "next one gets its slot.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.CRASHED, name=ZOMBIE, message=message)],
    )


def _notice_automation(notice: Notice, block: object) -> AutomationCore:
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": [notice.resources]}),
        expect=set(notice.events),
        posture=Posture.Reactive,
        threshold=1,
    )
    action = (
        CallWebhook.model_validate({"block_document_id": block, "payload": BODY})
        if block
        else DoNothing()
    )
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
    """Create it, or change what differs; `switch` None keeps it on or off as it is."""
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return
    (known, *doubles) = found
    for double in doubles:
        client.delete_automation(double.id)
    wanted = wanted.model_copy(update={"enabled": known.enabled if switch is None else switch})
    if _core(known) != _core(wanted):
        client.update_automation(known.id, wanted)


def _core(automation: AutomationCore) -> dict[str, object]:
    """What makes an automation; ids of its triggers are the server's."""
    fields = {"name", "description", "enabled", "actions"}
    trigger = automation.trigger.model_dump(mode="json", exclude={"id"})
    return {
        **automation.model_dump(mode="json", include=fields),
        "trigger": {key: _sorted(value) for key, value in trigger.items()},
    }


def _sorted(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, list) else value
