"""`rlhf feedback` on a store of its own."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.errors import EnvironmentFault, ParamsError
from config.load import load, write
from config.records import PipelineRow, kept_folder
from config.workspace.feedback import DOWN, SNAPSHOT, UP, FeedbackStore, KeptReply
from config.workspace.rows import add_pipeline_row
from labelling.anytime import share_at_any_time
from tests.conftest import ROOT


def rlhf(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["feedback", *arguments], catch_exceptions=False, standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(root: Path, run_id: str, time: float, **data: str | None) -> None:
    params = load(ROOT / "recipes/demo.yaml")
    folder = kept_folder(root, run_id)
    folder.mkdir(parents=True)
    write(params.model_copy(update={"data": params.data.model_copy(update=data)}), folder / "params.yaml")
    add_pipeline_row(root, PipelineRow(time=time, run_id=run_id, event="start"))


def test_without_a_store_it_says_how_to_begin(project: Path) -> None:
    with pytest.raises(EnvironmentFault, match="start rlhf serve with --keep-replies DAYS"):
        rlhf()


def test_models_are_compared_and_what_is_forgotten_is_named_with_the_runs_that_saw_it(project: Path) -> None:
    with closing(FeedbackStore(project)) as store:
        for number in range(6):
            store.keep(KeptReply(f"r{number}", "old" if number < 2 else "new", f"user {number}", "p", "reply", 3, 2))
            store.rate(f"r{number}", f"user {number}", DOWN if number == 0 else UP, "far\n\x1b[31mtoo long")
        store.snapshot()
    begun(project, "before", 1.0, feedback_source=str(SNAPSHOT))
    begun(project, "learnt", 9e9, feedback_source=str(SNAPSHOT))
    begun(project, "without", 9e9, feedback_source=None)
    shown = rlhf()
    assert max(map(len, shown.splitlines())) <= 80
    assert "50.0%" in shown
    assert "down, old: far \\x1b[31mtoo long" in shown
    newest, oldest = json.loads(rlhf("--json"))
    assert (newest["run_id"], newest["replies"], newest["up"]) == ("new", 4, 4)
    assert oldest["share"] == share_at_any_time(1, 2)._asdict()
    with pytest.raises(ParamsError, match="--user USER or --id ID"):
        rlhf("forget")
    said = rlhf("forget", "--user", "user 0")
    assert said.startswith("2 replies and words are removed")
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["learnt"]
    assert len((project / SNAPSHOT).read_text().splitlines()) == 5
    assert rlhf("forget", "--id", "nobody").startswith("0 replies and words")


def test_what_users_said_is_checked_as_the_next_run_will_read_it(project: Path) -> None:
    write(load(ROOT / "recipes/demo.yaml"), project / "params.yaml")
    with closing(FeedbackStore(project)) as store:
        for number in range(30):
            turns = [{"role": "user", "content": f"where is {number}"}]
            for side in ("a", "b"):
                store.keep(KeptReply(f"{side}{number}", "run", "", turns, f"it is {side} {number}", 3, 2))
            store.rate(f"a{number}", "ann", DOWN if number % 3 else UP, "")
        store.prefer("a1", "b1", "ann", "")
    done = CliRunner().invoke(app, ["data", "check", "--feedback"], catch_exceptions=False)
    shown = " ".join(done.stdout.split())
    assert "data/labels/feedback.jsonl: feedback" in shown
    assert "31 rows give 1 pairs, 10 good replies, 20 bad replies" in shown
    assert "a good reply weighs 2.00, a bad one 1" in shown
    assert "feedback_source: data/labels/feedback.jsonl" in shown
    assert len((project / SNAPSHOT).read_text().splitlines()) == 31
    with pytest.raises(ParamsError, match="name a file to check, or --feedback"):
        CliRunner().invoke(app, ["data", "check"], catch_exceptions=False)


@pytest.mark.parametrize("options", [("--compare",), ("--share", "0.2")])
def test_what_a_second_model_is_for_is_refused_without_one(project: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(ParamsError, match=rf"{options[0]} needs a second model\. Add --challenger RUN"):
        CliRunner().invoke(app, ["serve", *options], catch_exceptions=False)
