"""`rlhf promote` and `rlhf rollback` as people type them; the promotion itself is tested in
tests/tasks/champions/test_registry.py.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.errors import UserError
from config.workspace.champions import RECORD, Champion, ChampionRecord, Event, read_record, write_record


def rlhf(*arguments: str) -> None:
    CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)


def lineage(root: Path, *runs: str) -> None:
    champions = tuple(
        Champion(run_id=run, method="ppo", model_digest="m", data_version="d", data_key="k") for run in runs
    )
    event = Event(time=1.0, event="promoted", champion=runs[-1], before=None, by="test", why="test")
    write_record(root, ChampionRecord(lineage=champions, events=(event,)))


def test_a_run_that_is_not_there_is_named(project: Path) -> None:
    with pytest.raises(UserError, match="last is not there: 0 runs were recorded"):
        rlhf("promote")
    with pytest.raises(UserError, match=r"run 'nobody' is not in runs/pipeline\.jsonl"):
        rlhf("promote", "nobody", "--yes")
    assert not (project / RECORD).exists()


def test_going_back_asks_and_without_anybody_to_answer_changes_nothing(project: Path) -> None:
    lineage(project, "r1", "r2")
    before = (project / RECORD).read_bytes()
    with pytest.raises(UserError, match=r"Go back from r2 to r1\? stdin is not a terminal: approve with --yes"):
        rlhf("rollback")
    assert (project / RECORD).read_bytes() == before


@pytest.mark.parametrize(
    ("runs", "said"), [((), "there is no champion yet"), (("r1",), "r1 is the only champion so far")]
)
def test_without_a_previous_champion_there_is_no_way_back(project: Path, runs: tuple[str, ...], said: str) -> None:
    if runs:
        lineage(project, *runs)
    with pytest.raises(UserError, match=said):
        rlhf("rollback", "--yes")
    assert [entry.run_id for entry in read_record(project).lineage] == list(runs)
