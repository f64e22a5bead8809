"""Retrain cycles on a real Prefect server, from the decision to the champion. What a stage trains and what the two
helpers measure are files that a test writes; decisions and records are real. Real training is in
tests/e2e/test_retrain.py.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.testing.utilities import prefect_test_harness

from config import jsonl
from config.errors import EnvironmentFault, UserError
from config.load import load, write
from config.records import UsageRow, stages_of
from config.workspace.champions import champion_folder, read_record
from config.workspace.feedback import DOWN, FEEDBACK, UP, FeedbackStore, KeptReply
from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, Mean, RetrainRow, Safety, Share
from config.workspace.rows import pipeline_rows
from flows.label_import import label_import
from flows.promote import promote as promote_flow
from flows.retrain import retrain
from flows.rlhf import rlhf
from labelling.votes import VOTES_FILE
from tasks.champions.registry import promote, rollback
from tasks.planning import gate
from tests.audit.page import numbers, says
from tests.support.stage_project import make_project
from tests.tasks.champions.test_promotion_gate import WINNER
from tests.tasks.retraining.test_decision import examination

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Prefect's own clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STAGES = stages_of("ppo")
OUTS = {"data": ("data/prepared", "data/tokenizer")} | {
    stage: (f"models/{stage}",) for stage in ("sft", "reward", "ppo")
}
OUTPUTS = """
import shutil, sys
from pathlib import Path
for out in map(Path, sys.argv[2:]):
    out.mkdir(parents=True, exist_ok=True)
    (out / "content.txt").write_text(Path(f"{sys.argv[1]}.out").read_text())
if sys.argv[1] == "evaluate":
    Path("metrics").mkdir(exist_ok=True)
    shutil.copyfile("evaluation.json", "metrics/evaluate.json")
"""
HELPER = """
import json, sys, time
from pathlib import Path
time.sleep(0.2)
name, options = Path(__file__).stem, dict(zip(sys.argv[1::2], sys.argv[2::2]))
asked = {
    key: (Path(folder) / "models/ppo/content.txt").read_text()
    for key, folder in options.items() if key in ("--champion", "--challenger")
}
Path(f"{name}.asked.json").write_text(json.dumps(asked))
Path(options["--out"]).write_text(Path(f"{name}.json").read_text())
"""
LOSER = Share(value=0.41, low=0.35, high=0.47, of=200)
ENOUGH = examination(added=500)


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def project(
    server: None, empty_database: Path, stage_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A project that the tests work in one after the other, with a first champion."""
    folder = tmp_path_factory.mktemp("retrain")
    root = make_project(folder / "project", folder / "remote", STAGES)
    shutil.copyfile(empty_database, root / "mlflow.db")
    (root / "outputs.py").write_text(OUTPUTS)
    pipeline = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    for stage in STAGES:
        entry = pipeline["align"]["do"] if stage == "ppo" else pipeline[stage]
        outs = OUTS.get(stage, ())
        entry["cmd"] += f" && python outputs.py {stage} {' '.join(outs)}"
        outs = (*outs, "metrics/evaluate.json") if stage == "evaluate" else outs
        entry["outs"] += [{out: {"persist": True}} for out in outs]
    pipeline["data"]["deps"].append("data/inputs/data.json")
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": pipeline}))
    helpers = root / "training" / "retraining"
    helpers.mkdir(parents=True)
    for package in (helpers.parent, helpers):
        (package / "__init__.py").touch()
    for name in ("examine", "contest"):
        (helpers / f"{name}.py").write_text(HELPER)
    prepare(root)
    changes = ["prices.usd_per_device_hour=36", "retrain.safety_margin=0.05"]
    write(load(root / "params.yaml", changes), root / "params.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, value in stage_environment.items():
            patch.setenv(name, value)
        assert cycle(root).is_failed(), "there is no champion yet"
        state = rlhf(load(root / "params.yaml"), return_state=True)
        assert state.is_completed(), state
        promote(root, runs(root)[-1], "the first one", by="test")
        yield root


def prepare(root: Path, contest: Any = WINNER, found: Any = ENOUGH, hacked: bool = False) -> None:
    """What the next cycle's helpers and its evaluation measure."""
    (root / "contest.json").write_text(contest.model_dump_json())
    (root / "examine.json").write_text(found.model_dump_json())
    judged = {"reward_hacking": hacked, "reward_hacking_reason": "the score alone is up"}
    (root / "evaluation.json").write_text(json.dumps(judged))


def news(root: Path, text: str) -> None:
    """Another version of the data, which all stages depend on."""
    (root / "data.in").write_text(text)
    (root / VOTES_FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / VOTES_FILE).write_text(f"{text}\n")


def cycle(root: Path, *changes: str, force: bool = False) -> Any:
    return retrain(load(root / "params.yaml", list(changes)), force=force, return_state=True)


def rows(root: Path) -> list[RetrainRow]:
    return jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows


def end(root: Path) -> RetrainRow:
    """Of the newest cycle."""
    newest = rows(root)[-1]
    assert newest.event == "end"
    return newest


def runs(root: Path) -> list[str]:
    result = pipeline_rows(root)
    return [row.run_id for row in result if row.event == "start"]


def champion(root: Path) -> str:
    record = read_record(root).champion
    assert record is not None
    return record.run_id


def artifacts(state: Any) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        by_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        return {artifact.key: artifact.data for artifact in client.read_artifacts(artifact_filter=by_run)}


def usd_of(root: Path, run_id: str) -> float:
    """What the run's rows cost at 36 dollars an hour, a cent a second."""
    usage = [jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows for stage in STAGES]
    return sum(row.seconds / 100 for rows in usage for row in rows if row.run_id == run_id)


def test_without_a_champion_there_is_nothing_to_compare_with(project: Path) -> None:
    first = next(row for row in rows(project) if row.event == "end")
    assert first.outcome == "failed"
    assert first.said.endswith("Name one first: rlhf promote last.")


def test_unchanged_inputs_end_the_cycle_as_skipped_with_an_artifact(project: Path) -> None:
    before = runs(project)
    state = cycle(project)
    assert (state.name, state.is_completed()) == ("Skipped", True)
    row = end(project)
    assert (row.outcome, row.detail) == ("skipped", {"champion": before[0], "usd": 0.0})
    assert artifacts(state)["retrain"].startswith("# Retrain: skipped")
    assert runs(project) == before


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ("retrain", "a cycle is running already (process PID), and this one has nothing to add"),
        ("run", "process PID is already running the pipeline"),
    ],
)
def test_who_is_at_work_already_is_not_disturbed(project: Path, lock: str, said: str) -> None:
    with (project / ".rlhf" / f"{lock}.lock").open("w+") as other:
        other.write(str(os.getppid()))
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        state = cycle(project)
    assert state.name == "Skipped"
    assert said.replace("PID", str(os.getppid())) in end(project).said


def test_too_little_news_is_examined_and_not_trained_on(project: Path) -> None:
    news(project, "two")
    prepare(project, found=examination(added=99))
    before = runs(project)
    assert cycle(project).name == "Skipped"
    assert "99 rows were added or changed" in end(project).said
    (cost,) = [row for row in rows(project) if row.cycle == end(project).cycle and row.usd]
    assert (cost.event, cost.detail) == ("cost", {"process": "examine"})
    assert end(project).detail["usd"] == cost.usd >= 0.002, "a fifth of a second, a cent each"
    assert runs(project) == before


@pytest.mark.parametrize("force", [False, True])
def test_the_months_money_is_not_lifted_by_reasons_or_force(project: Path, force: bool) -> None:
    prepare(project)
    assert cycle(project, "retrain.monthly_usd=0.03", force=force).name == "Skipped"
    spent = sum(row.usd for row in rows(project) if row.event == "cost")
    planned, remaining, counted = re.findall(r"\$[\d.]+", end(project).said)
    assert says(remaining, [max(0.0, 0.03 - spent)])
    assert says(counted, [spent])
    assert numbers(planned)[0][0] > 0.03
    assert "of retrain.monthly_usd=0.03 are left" in end(project).said


def test_a_model_that_loses_is_trained_compared_and_not_promoted(project: Path) -> None:
    first, before = champion(project), len(read_record(project).events)
    prepare(project, WINNER.model_copy(update={"win_rate": LOSER}))
    state = cycle(project)
    row = end(project)
    assert (state.name, row.outcome) == ("Kept", "kept"), row.said
    assert "wins against the champion fails: it wins 41.0%" in row.said
    assert row.run_id == runs(project)[-1] != first
    content = json.loads((project / "contest.asked.json").read_text())
    assert content == {"--champion": "one", "--challenger": "two"}
    assert json.loads((project / "examine.asked.json").read_text()) == {"--champion": "one"}
    assert (champion(project), len(read_record(project).events)) == (first, before)
    cycle_rows = [item for item in rows(project) if item.cycle == row.cycle]
    helpers = sum(item.usd for item in cycle_rows if item.event == "cost")
    assert row.detail["usd"] == pytest.approx(helpers + usd_of(project, row.run_id))
    assert [item.event for item in cycle_rows] == ["begin", "cost", "reserved", "cost", "end"]
    page = (project / RETRAIN_FOLDER / row.cycle / "cycle.md").read_text()
    assert "**fails**" in page
    assert artifacts(state)["retrain"] == page
    shipped = MlflowClient(f"sqlite:///{project / 'mlflow.db'}").search_runs(
        ["1"], f"tags.`rlhf.run_id` = '{row.run_id}' and tags.`rlhf.kind` = 'run'"
    )[0]
    assert shipped.data.tags["rlhf.retrain"] == f"kept: {row.said}"
    assert shipped.data.tags["rlhf.compared_with"] == first
    assert shipped.data.metrics["contest/win_rate_high"] == LOSER.high
    assert shipped.data.metrics["contest/usd"] == pytest.approx(row.detail["usd"])


def test_data_that_was_decided_on_is_not_tried_again(project: Path) -> None:
    before = runs(project)
    assert cycle(project).name == "Skipped"
    assert "nothing is new since the cycle" in end(project).said
    assert runs(project) == before


SAFETY = Safety(prompts=40, judge="gold", drop=Mean(mean=0.03, low=0.0, high=0.06))


@pytest.mark.parametrize(
    ("contest", "hacked", "said"),
    [
        ({"hacking": True, "hacking_reason": "it shouts"}, False, "is misled: it shouts"),
        ({}, True, "the run's evaluation found reward hacking: the score alone is up"),
        ({"safety": SAFETY}, False, "safety prompts not worse fails: +0.030 lower on 40"),
        ({"kl": 21.0}, False, "KL within bounds fails: 21.0 nats per response"),
        ({"chars": 200.0}, False, "length within bounds fails: 200 characters"),
    ],
    ids=["hacking", "hacked", "safety", "kl", "length"],
)
def test_each_condition_alone_keeps_the_champion(
    project: Path, contest: dict[str, Any], hacked: bool, said: str
) -> None:
    first = champion(project)
    prepare(project, WINNER.model_copy(update=contest), hacked=hacked)
    prompts = "evaluate.prompts=7" if hacked else "evaluate.prompts=400"
    assert cycle(project, prompts, force=True).name == "Kept"
    assert said in end(project).said
    assert end(project).said.count(" fails: ") == 1
    assert champion(project) == first


def test_a_better_model_waits_for_approval_is_promoted_and_rolled_back(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a server starts the cycle, which then asks before it trains."""
    first = champion(project)
    news(project, "three")
    prepare(project)
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    monkeypatch.setattr(gate, "APPROVAL_POLL_SECONDS", 1)
    seen: list[int] = []

    def resume() -> None:
        with get_client(sync_client=True) as client:
            deadline = time.monotonic() + 300
            while time.monotonic() < deadline:
                for run in client.read_flow_runs():
                    if run.state_name == "Paused":
                        seen.append(len(runs(project)))
                        client.resume_flow_run(run.id)
                        return
                time.sleep(0.3)

    before = len(runs(project))
    thread = threading.Thread(target=resume)
    thread.start()
    state = cycle(project, "budget.approval_usd=0.0001")
    thread.join()
    assert seen == [before], "nothing was started before it was approved"
    row = end(project)
    assert (state.name, row.outcome) == ("Promoted", "promoted"), row.said
    assert json.loads((project / "contest.asked.json").read_text()) == {"--champion": "one", "--challenger": "three"}
    record = read_record(project)
    assert champion(project) == row.run_id == runs(project)[-1]
    assert record.previous is not None
    assert record.previous.run_id == first
    event = record.events[-1]
    assert (event.by, event.champion, event.before) == ("retrain", row.run_id, first)
    assert "it wins 60.0% against the champion on 200 held-out prompts" in event.why
    aliases = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    for alias, run_id in (("champion", row.run_id), ("previous", first)):
        version = aliases.get_model_version_by_alias("helpdesk-assistant", alias)
        entry = next(item for item in record.lineage if item.run_id == run_id)
        assert version.tags["dvc.digest"] == entry.model_digest
    rollback(project, "people complained", by="ada")
    event = read_record(project).events[-1]
    assert (champion(project), event.event, event.by) == (first, "rolled_back", "ada")
    assert cycle(project).name == "Skipped", "what was rolled back does not come back by itself"


def thumbs(root: Path, run_id: str, up: int, of: int) -> None:
    """So many users rate a reply of a run's model."""
    with closing(FeedbackStore(root)) as store:
        for number in range(of):
            reply = f"{run_id}-{time.monotonic_ns()}-{number}"
            store.keep(KeptReply(reply, run_id, f"user {number}", "p", "r", 1, 1))
            store.rate(reply, f"user {number}", UP if number < up else DOWN, "")


@pytest.mark.parametrize(("good", "outcome"), [(190, "promoted"), (60, "kept")])
def test_a_model_that_wins_the_contest_is_on_trial_until_users_have_decided(
    project: Path, good: int, outcome: str
) -> None:
    first, live = champion(project), "retrain.evidence=live"
    for path in (project / FEEDBACK).parent.glob(f"{FEEDBACK.name}*"):
        path.unlink()
    news(project, f"on trial, {outcome}")
    prepare(project)
    assert cycle(project, live).name == "Trial"
    row = end(project)
    challenger = runs(project)[-1]
    assert (row.run_id, champion(project)) == (challenger, first)
    assert f"rlhf serve champion --challenger {challenger} --keep-replies 30" in row.said
    thumbs(project, first, 14, 20)
    thumbs(project, challenger, 19, 20)
    state, before = cycle(project, live), len(runs(project))
    assert state.name == "Trial"
    assert f"users call 19 of 20 replies of {challenger} good and 14 of 20 of {first}" in end(project).said
    page = artifacts(state)["retrain"]
    assert "users call 19 of 20" in page
    assert f"| `{challenger}` | 20 | 20 | 95.0% (" in page
    thumbs(project, first, 126, 180)
    thumbs(project, challenger, good - 19, 180)
    assert cycle(project, live).name == outcome.capitalize()
    row = end(project)
    assert (row.outcome, row.run_id, row.detail["usd"]) == (outcome, challenger, 0.0)
    assert champion(project) == (challenger if outcome == "promoted" else first)
    assert len(runs(project)) == before, "nothing was trained for it"
    assert cycle(project, live).name == "Skipped", "decided is decided"
    if outcome == "promoted":
        rollback(project, "back to where the next test begins", by="test")


def test_a_run_is_promoted_by_hand_without_a_contest(project: Path) -> None:
    before = champion(project)
    news(project, "four")
    state = promote_flow(load(project / "params.yaml"), why="we like it", return_state=True)
    assert state.name == "Promoted"
    (event,) = read_record(project).events[-1:]
    assert runs(project)[-1] == champion(project) == event.champion != before
    assert (event.event, event.before, event.why) == ("promoted", before, "we like it")
    assert event.by != "promote", "the flow run by its name"
    assert state.message == f"{event.champion} is the champion: we like it"


def test_votes_of_another_tool_are_counted_on_its_page(project: Path) -> None:
    vote = {"completed_by": 1, "result": [{"type": "pairwise", "value": {"selected": "left"}}]}
    data = {"prompt": "p", "text1": "a", "text2": "b"}
    votes = [{"data": data, "annotations": [vote]}, {"id": 5}]
    (project / "export.json").write_text(json.dumps(votes))
    (project / VOTES_FILE).unlink(missing_ok=True)
    for imported in (1, 0):
        text = artifacts(label_import("export.json", "label-studio", return_state=True))["votes"]
        assert f"# {imported} votes imported" in text
        assert f"{1 - imported} of `export.json` were in `{VOTES_FILE}` already" in text
        assert "1 entries were refused: 1 not_a_task" in text
        assert "`data/labels/quarantine-export.jsonl`" in text


def test_a_champion_whose_files_were_deleted_is_named(project: Path) -> None:
    shutil.rmtree(champion_folder(project, champion(project)))
    state = cycle(project)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, EnvironmentFault | UserError)
    assert f"champions/{champion(project)} was deleted" in str(error)
