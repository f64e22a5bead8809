from pathlib import Path

from config.records import PICTURE, SUMMARY
from tracking.labels import MOST_CHANGES, changes, description, nickname


def test_a_run_is_called_by_the_words_of_its_id() -> None:
    assert nickname("20261121-182020-brave-otter") == "brave-otter"
    assert nickname("r1") == "r1"
    assert nickname("a-b-c") == "a-b-c"


def test_what_a_run_changed_is_told_parameter_by_parameter() -> None:
    before = {"ppo.kl.coef": "0.05", "seed": "1", "gone": "x", "tracking.uri": "sqlite:///a"}
    now = {"ppo.kl.coef": "0.1", "seed": "1", "new": "y" * 100, "tracking.uri": "http://b"}
    assert changes(before, now) == f"ppo.kl.coef: 0.05 → 0.1, new: – → {'y' * 59}…, gone: x → –"
    assert changes(now, now) == "no parameter"
    assert changes(None, now) == "first run"


def test_many_changes_are_counted() -> None:
    before, now = ({f"p{i}": value for i in range(10)} for value in "ab")
    assert changes(before, now).count("→") == MOST_CHANGES
    assert changes(before, now).endswith(", 4 more")


def test_a_description_shows_the_runs_own_picture_and_its_table_with_room(tmp_path: Path) -> None:
    assert description("abc", tmp_path) == {}
    (tmp_path / SUMMARY).write_text(
        f"**Alignment worked.**\n\n![key picture]({PICTURE})\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    (name, shown), *more = description("abc", tmp_path).items()
    assert (name, more) == ("mlflow.note.content", [])
    assert shown.splitlines()[2] == "![key picture](get-artifact?path=key.svg&run_uuid=abc)"
    assert shown.splitlines()[4:] == ["| a&emsp; | b |", "|---|---|", "| 1&emsp; | 2 |"]
