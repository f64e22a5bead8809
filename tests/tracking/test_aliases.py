"""Champion and previous in a real registry, in line with the record."""

import hashlib
import json
from pathlib import Path

import pytest

from config.schema import Params
from config.workspace.champions import Champion, ChampionRecord, Event, champion_folder, write_record
from tests.tracking.test_sync import Story, client, params, root
from tracking.sync import sync

__all__ = ["params", "root"]
pytestmark = pytest.mark.integration

CONFIGS = [json.dumps({"number": number}) for number in range(1, 4)]
NAME = "helpdesk-assistant"


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


DIGESTS = [f"{md5(json.dumps([{'md5': md5(config), 'relpath': 'config.json'}]))}.dir" for config in CONFIGS]
"""As DVC has them."""


def a_run(root: Path, params: Params, number: int) -> str:
    story = Story(root, params, f"r{number}")
    story.start()
    story.model(CONFIGS[number - 1])
    story.pipeline("end", state="completed")
    return story.run_id


def decide(root: Path, *numbers: int) -> None:
    """Record these runs as the lineage, the last of them promoted."""
    lineage = tuple(
        Champion(run_id=f"r{number}", method="ppo", model_digest=DIGESTS[number - 1], data_version="d", data_key="k")
        for number in numbers
    )
    event = Event(time=1.0, event="promoted", champion=lineage[-1].run_id, before=None, by="test", why="test")
    write_record(root, ChampionRecord(lineage=lineage, events=(event,)))


def alias(root: Path, name: str) -> str | None:
    """The digest behind an alias."""
    aliases = client(root).get_registered_model(NAME).aliases
    return client(root).get_model_version(NAME, aliases[name]).tags["dvc.digest"] if name in aliases else None


def test_the_aliases_follow_promotions_and_rollbacks(root: Path, params: Params) -> None:
    for number in (1, 2):
        a_run(root, params, number)
        sync(root, params)
    assert (alias(root, "champion"), alias(root, "challenger")) == (None, DIGESTS[1])
    decide(root, 1)
    sync(root, params)
    assert (alias(root, "champion"), alias(root, "previous")) == (DIGESTS[0], None)
    decide(root, 1, 2)
    sync(root, params)
    assert (alias(root, "champion"), alias(root, "previous")) == (DIGESTS[1], DIGESTS[0])
    decide(root, 1)
    sync(root, params)
    assert (alias(root, "champion"), alias(root, "previous")) == (DIGESTS[0], None)


def test_an_alias_that_somebody_moved_stays_until_the_record_changes(root: Path, params: Params) -> None:
    for number in (1, 2):
        a_run(root, params, number)
        sync(root, params)
    decide(root, 1)
    sync(root, params)
    client(root).set_registered_model_alias(NAME, "champion", "2")
    sync(root, params)
    assert alias(root, "champion") == DIGESTS[1]
    decide(root, 2, 1)
    sync(root, params)
    assert alias(root, "champion") == DIGESTS[0]


def test_a_champion_that_was_replaced_before_mlflow_was_up_is_registered_from_its_folder(
    root: Path, params: Params
) -> None:
    a_run(root, params, 1)
    folder = champion_folder(root, "r1") / "models" / "ppo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    decide(root, 1)
    a_run(root, params, 2)  # the workspace has the second model now
    sync(root, params)
    assert alias(root, "champion") == DIGESTS[0]
    version = client(root).get_model_version_by_alias(NAME, "champion")
    assert version.tags["rlhf.run_id"] == "r1"
    assert [item.path for item in client(root).list_artifacts(version.run_id, "model")] == ["model/config.json"]


def test_a_champion_that_cannot_be_named_yet_is_tried_again(root: Path, params: Params) -> None:
    a_run(root, params, 1)
    sync(root, params)
    decide(root, 1, 3)
    sync(root, params)
    assert (alias(root, "champion"), alias(root, "previous")) == (None, DIGESTS[0])
    a_run(root, params, 3)
    sync(root, params)
    assert alias(root, "champion") == DIGESTS[2]
