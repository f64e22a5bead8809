"""Promotions and rollbacks on a project whose outputs are a few bytes, in a real DVC cache."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from config import jsonl
from config.errors import EnvironmentFault, ModelError, UserError
from config.inputs import MODEL_DIGESTS, digest_files
from config.load import load, write
from config.records import PipelineRow, kept_folder
from config.workspace.champions import RECORD, champion_folder, read_record
from tasks.champions.files import check_champion
from tasks.champions.registry import KEPT, promote, require_champion, rollback
from tasks.dvc.data_key import key_now
from tasks.retraining import cycle as retrain
from tasks.retraining.cycle import Cycle
from tasks.run.run import begin_run, keep_copies
from tasks.stage.outcome import Outcome
from tasks.stage.process import Ended
from tasks.stage.runner import record
from tests.conftest import ROOT, git
from tests.tasks.champions.test_promotion_gate import WINNER

pytestmark = pytest.mark.usefixtures("quick_stages")

STAGES = {
    "data": ("data/prepared", "data/tokenizer"),
    "sft": ("models/sft",),
    "reward": ("models/reward",),
    "ppo": ("models/ppo",),
}
COMMAND = """
import sys
from pathlib import Path
for out in map(Path, sys.argv[1:]):
    out.mkdir(parents=True, exist_ok=True)
    (out / "x.txt").write_text(Path("in.txt").read_text() + str(out))
    if out.name == "ppo":
        (out / "adapter_config.json").write_text('{"base_model_name_or_path": "../../base/small"}')
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the runs run-0 to run-3, whose outputs are still those of the last, and a DVC remote beside
    it.
    """
    root = tmp_path_factory.mktemp("template") / "project"
    root.mkdir()
    (root / "make.py").write_text(COMMAND)
    stages = {
        name: {
            "cmd": f"{sys.executable} make.py {' '.join(outs)}",
            "deps": ["in.txt", *(["data/inputs/data.json", "data/inputs/model.json"] if name == "data" else [])],
            "outs": [{out: {"persist": True}} for out in outs],
        }
        for name, outs in STAGES.items()
    }
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    write(load(ROOT / "recipes" / "demo.yaml"), root / "params.yaml")
    (root / ".dvc").mkdir()
    (root / ".dvc" / "config").write_text(
        "[core]\n    analytics = false\n    remote = local\n['remote \"local\"']\n    url = ../../remote\n"
    )
    git(root, "init", "--quiet")
    params = load(root / "params.yaml")
    for number in range(4):
        (root / "in.txt").write_text(f"{number} ")
        run = begin_run(root, f"run-{number}", params, {})
        dvc(root, "repro")
        for stage in STAGES:
            record(run, stage, Outcome(cached=False, attempt=None))
        run.record("end", state="completed")
        keep_copies(run)
    return root


def dvc(root: Path, command: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", command, "--quiet"], cwd=root, check=True, timeout=120)


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "project")
    return tmp_path / "project"


def chat(root: Path, monkeypatch: pytest.MonkeyPatch, run: str, *sets: str) -> dict[str, str]:
    """What `rlhf chat RUN` gives its process to talk to: `models/ppo` and the method in params."""
    result: dict[str, str] = {}

    def run_chat(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        folder = Path(command[command.index("--folder") + 1])
        result["ppo"] = (folder / "models/ppo/x.txt").read_text()
        result["sft"] = (folder / "models/sft/x.txt").read_text()
        result["method"] = load(folder / "params.yaml").align.method
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(root)
    with monkeypatch.context() as patch:
        patch.setattr("cli.commands.chat.subprocess.run", run_chat)
        done = CliRunner().invoke(app, ["chat", run, *sets], catch_exceptions=False)
    assert done.exit_code == 0
    return result


def test_chat_talks_to_the_runs_own_models_whatever_is_in_place(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(load(project / "params.yaml", ["align.method=dpo"]), project / "params.yaml")
    (project / "models/ppo/x.txt").unlink()
    (project / "models/ppo/x.txt").write_text("half of another run's")
    for number in (0, 3):
        result = chat(project, monkeypatch, f"run-{number}")
        assert result == {"ppo": f"{number} models/ppo", "sft": f"{number} models/sft", "method": "ppo"}
    assert list((project / ".rlhf").glob("chat-*")) == []
    promote(project, "run-1", "the first", by="ada")
    assert chat(project, monkeypatch, "champion")["ppo"] == "1 models/ppo"
    (champion_folder(project, "run-1") / "models/sft/x.txt").unlink()
    with pytest.raises(EnvironmentFault, match="was deleted"):
        chat(project, monkeypatch, "champion")


def a_base(root: Path, content: str) -> None:
    """Put a local model at base/small, which the aligned model is an adapter on."""
    (root / "base/small").mkdir(parents=True, exist_ok=True)
    (root / "base/small/config.json").write_text(content)


def lineage(root: Path) -> list[str]:
    return [entry.run_id for entry in read_record(root).lineage]


def model(root: Path, run_id: str) -> str:
    return (champion_folder(root, run_id) / "models/ppo/x.txt").read_text()


def test_a_champion_keeps_its_files_when_later_runs_replace_them(project: Path) -> None:
    first, second = "run-0", "run-3"
    promote(project, first, "the first", by="ada")
    assert (project / "models/ppo/x.txt").read_text() == "3 models/ppo"
    assert model(project, first) == "0 models/ppo"
    assert check_champion(project, first) == champion_folder(project, first)

    promote(project, second, "better", by="bob", instead_of=first)
    record = read_record(project)
    assert (record.champion and record.champion.run_id, record.previous and record.previous.run_id) == (second, first)
    assert [(event.event, event.champion, event.before, event.by, event.why) for event in record.events] == [
        ("promoted", first, None, "ada", "the first"),
        ("promoted", second, first, "bob", "better"),
    ]
    lock = yaml.safe_load((project / "dvc.lock").read_text())
    assert record.lineage[-1].model_digest == lock["stages"]["ppo"]["outs"][0]["md5"]
    assert record.lineage[-1].data_key == key_now(project, load(project / "params.yaml"))


def test_rollback_brings_back_the_one_before_and_is_recorded(project: Path) -> None:
    first, second, third = "run-0", "run-1", "run-2"
    for run_id in (first, second, third):
        promote(project, run_id, "newer")
    rollback(project, "people complained", by="ada")
    assert lineage(project) == [first, second]
    assert not champion_folder(project, third).exists()
    rollback(project, "still")
    assert lineage(project) == [first]
    with pytest.raises(UserError, match=f"{first} is the only champion so far"):
        rollback(project, "again")
    assert [event.event for event in read_record(project).events] == ["promoted"] * 3 + ["rolled_back"] * 2
    promote(project, third, "fixed")
    assert lineage(project) == [first, third]


def test_only_the_newest_champions_keep_their_folders(project: Path) -> None:
    runs = [f"run-{i}" for i in range(KEPT + 1)]
    for run_id in runs:
        promote(project, run_id, "newer")
    assert lineage(project) == runs[1:]
    assert sorted(path.name for path in (project / "champions").iterdir() if path.is_dir()) == sorted(runs[1:])


def test_a_deleted_or_changed_file_of_the_champion_is_named_and_brought_back(project: Path) -> None:
    run_id = "run-0"
    promote(project, run_id, "first")
    file = champion_folder(project, run_id) / "models/reward/x.txt"
    file.unlink()
    with pytest.raises(
        EnvironmentFault, match=r"models/reward/x.txt was deleted\. Bring it back with rlhf promote run-0"
    ):
        check_champion(project, run_id)
    file.write_text("other")
    with pytest.raises(EnvironmentFault, match=r"models/reward/x\.txt was changed"):
        check_champion(project, run_id)
    promote(project, run_id, "fix")
    assert check_champion(project, run_id)
    assert len(read_record(project).events) == 1
    shutil.rmtree(champion_folder(project, run_id))
    with pytest.raises(EnvironmentFault, match="champions/run-0 was deleted"):
        check_champion(project, run_id)


def test_an_output_that_is_gone_everywhere_is_named_and_nothing_is_promoted(project: Path) -> None:
    first = "run-0"
    shutil.rmtree(project / ".dvc" / "cache")
    with pytest.raises(ModelError, match=r"of run run-0 was deleted: .* is neither in DVC's cache nor in its remote"):
        promote(project, first, "why not")
    assert lineage(project) == []
    assert [path.name for path in (project / "champions").iterdir()] == [".lock"]


def test_what_the_cache_lost_comes_from_the_remote(project: Path) -> None:
    first = "run-3"
    dvc(project, "push")
    shutil.rmtree(project / ".dvc" / "cache")
    promote(project, first, "back")
    assert model(project, first) == "3 models/ppo"


@pytest.mark.parametrize(("state", "said"), [("failed", "is failed"), ("", "is unfinished")])
def test_only_a_completed_run_is_promoted(project: Path, state: str, said: str) -> None:
    run_id = "run-0"
    rows = project / "runs" / "pipeline.jsonl"
    rows.write_text("".join(line for line in rows.read_text().splitlines(keepends=True) if '"end"' not in line))
    if state:
        jsonl.append(rows, PipelineRow(time=1.0, run_id=run_id, event="end", state=state))
    with pytest.raises(ModelError, match=said):
        promote(project, run_id, "why not")
    with pytest.raises(UserError, match=r"run nobody is not in runs/pipeline\.jsonl"):
        promote(project, "nobody", "why not")
    with pytest.raises(UserError, match="there is no champion yet"):
        require_champion(project)


def test_the_second_of_two_promotions_at_once_is_refused_in_one_line(project: Path) -> None:
    run_id = "run-0"
    (project / "champions").mkdir()
    with (project / "champions" / ".lock").open("a+") as other:
        other.write(str(os.getppid()))
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            EnvironmentFault, match=f"process {os.getppid()} is promoting or rolling back right now: nothing was "
        ):
            promote(project, run_id, "me too")
    assert lineage(project) == []
    promote(project, run_id, "now")
    assert lineage(project) == [run_id]


def test_a_champion_that_changed_since_the_comparison_is_not_replaced(project: Path) -> None:
    first, second, third = "run-0", "run-1", "run-2"
    promote(project, first, "first")
    promote(project, second, "meanwhile")
    with pytest.raises(EnvironmentFault, match=f"the champion is {second} now, not {first}"):
        promote(project, third, "it beat the first", instead_of=first)
    assert lineage(project) == [first, second]


def race(root: str, run_id: str, results: "multiprocessing.Queue[str]") -> None:
    try:
        promote(Path(root), run_id, "race")
        results.put("promoted")
    except EnvironmentFault:
        results.put("refused")


def test_many_promotions_at_once_leave_one_whole_record(project: Path) -> None:
    runs = [f"run-{i}" for i in range(3)]
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=race, args=(str(project), run_id, results)) for run_id in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    said = [results.get(timeout=10) for _ in processes]
    record = read_record(project)
    assert said.count("promoted") == len(record.events) == len(record.lineage) >= 1
    assert all(check_champion(project, entry.run_id) for entry in record.lineage)


def test_a_broken_record_is_told_and_never_replaced_in_silence(project: Path) -> None:
    run_id = "run-0"
    promote(project, run_id, "first")
    text = (project / RECORD).read_text()
    (project / RECORD).write_text(text[:40])
    with pytest.raises(EnvironmentFault, match=r"record.json cannot be read .* so the champion is unknown"):
        promote(project, run_id, "again")
    assert (project / RECORD).read_text() == text[:40]
    assert json.loads(text)["lineage"][0]["run_id"] == run_id


# ---------------------------------------------------------------- evidence of a retrain cycle


def a_cycle(root: Path, run_id: str) -> Cycle:
    """A cycle whose run has completed, with the champion run-0; another run has replaced the checkout's outputs
    since.
    """
    promote(root, "run-0", "first")
    for folder, hacked in ((root, True), (kept_folder(root, run_id), False)):
        (folder / "metrics").mkdir(exist_ok=True)
        (folder / "metrics/evaluate.json").write_text(json.dumps({"reward_hacking": hacked}))
    return Cycle(root, load(root / "params.yaml"))


def test_a_contest_judges_the_run_it_is_about_whatever_the_checkout_holds_by_then(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = {}

    def run_process(command: Sequence[str], *_: object) -> Ended:
        given = dict(zip(command[3::2], map(Path, command[4::2]), strict=True))
        judged.update(
            {side: (given[f"--{side}"] / "models/ppo/x.txt").read_text() for side in ("champion", "challenger")}
        )
        given["--out"].write_text(WINNER.model_dump_json())
        return Ended(1, 0, 1.0, "")

    monkeypatch.setattr(retrain, "run_process", run_process)
    cycle = a_cycle(project, "run-1")
    won = retrain.winner.fn(cycle, require_champion(project), "run-1")
    assert won is not None, "the evaluation of the run itself found no reward hacking"
    assert won.run_id == "run-1"
    assert (project / "models/ppo/x.txt").read_text() == "3 models/ppo"
    assert judged == {"champion": "0 models/ppo", "challenger": "1 models/ppo"}
    assert [path.name for path in cycle.folder.iterdir()] == ["contest.json"]


def test_an_evaluation_that_is_not_the_runs_own_is_refused(project: Path) -> None:
    cycle = a_cycle(project, "run-1")
    lock = kept_folder(project, "run-1") / "dvc.lock"
    content = yaml.safe_load(lock.read_text())
    content["stages"]["evaluate"] = {"outs": [{"path": "metrics/evaluate.json", "md5": "0" * 32}]}
    lock.write_text(yaml.safe_dump(content))
    with pytest.raises(ModelError, match=r"metrics/evaluate\.json was changed: it is not what run run-1 made"):
        retrain.winner.fn(cycle, require_champion(project), "run-1")


def test_an_adapter_whose_base_was_changed_since_its_run_is_refused(project: Path) -> None:
    a_base(project, "one")
    params = load(project / "params.yaml", ["model.path=base/small", "model.random=null"])
    lock = kept_folder(project, "run-1") / "dvc.lock"
    content = yaml.safe_load(lock.read_text())
    (dep,) = (dep for dep in content["stages"]["data"]["deps"] if dep["path"] == "data/inputs/model.json")
    dep["md5"] = hashlib.md5(digest_files(project, params)[MODEL_DIGESTS].encode(), usedforsecurity=False).hexdigest()
    lock.write_text(yaml.safe_dump(content))
    write(params, kept_folder(project, "run-1") / "params.yaml")
    promote(project, "run-1", "as it was")
    assert (champion_folder(project, "run-1") / "base/small/config.json").read_text() == "one"
    shutil.rmtree(champion_folder(project, "run-1"))
    a_base(project, "another")
    with pytest.raises(ModelError, match=r"model\.path=base/small was changed since run run-1"):
        promote(project, "run-1", "again")
