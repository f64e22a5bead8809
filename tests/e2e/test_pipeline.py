"""The whole pipeline with its real stages on a tiny recipe: killed everywhere, rerun, repriced, cloned."""

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml
from mlflow import MlflowClient

from benchmarks.projects.checkouts import point_remote
from config import jsonl
from config.ports import free_port
from config.records import AttemptRow, PipelineRow, stages_of
from config.schema import Params
from config.workspace.benchmarked import read_benchmarked
from config.workspace.champions import read_record
from config.workspace.rows import pipeline_rows
from tasks.servers.plans import prefect_plan
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import prefect_api, start, stop
from tests.audit.accounts import Accounts
from tests.audit.checks import check_ledger, check_points, check_summary, runs_by_key
from tests.conftest import ROOT, git
from tests.training.support.tiny import DISTILL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STAGES = stages_of("ppo")
TINY = ROOT / "tests" / "e2e" / "tiny.yaml"
STEP_SECONDS = 300.0
"""For what takes seconds on an idle machine: a busy one is not a failure."""
TRAINING = {"sft", "reward", "ppo"}
"""Stages with checkpoints worth resuming from in so short a run."""


class Checkout(NamedTuple):
    root: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli.main", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS * 2,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.said_path.open("wb") as said:
            return subprocess.Popen(self.command(*arguments), cwd=self.root, stdout=subprocess.DEVNULL, stderr=said)

    def talk(self, run: str, prompts: Sequence[str], max_new_tokens: int) -> subprocess.CompletedProcess[str]:
        """Greedy replies of rlhf chat."""
        settings = ("--temperature", "0", "--max-new-tokens", str(max_new_tokens))
        done = subprocess.run(
            self.command("chat", run, *settings),
            cwd=self.root,
            input="\n".join(prompts),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done

    @property
    def said_path(self) -> Path:
        return self.root.parent / f"{self.root.name}.stderr"

    def said(self) -> str:
        """What the last started process printed to stderr."""
        return self.said_path.read_text()

    def attempts(self, stage: str) -> list[AttemptRow]:
        return jsonl.read(self.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows

    def rows(self) -> list[PipelineRow]:
        return pipeline_rows(self.root)

    def starts(self) -> int:
        """Stage processes so far."""
        return sum(row.event == "start" for stage in (*STAGES, "dpo") for row in self.attempts(stage))


@contextmanager
def served(root: Path) -> Iterator[Checkout]:
    """A checkout with a Prefect server of its own, so that not every run has to start one."""
    start(root, [prefect_plan(root, free_port())])
    try:
        yield Checkout(root)
    finally:
        stop(root)


@pytest.fixture(scope="module")
def checkout(new_checkout: Callable[[], Path]) -> Iterator[Checkout]:
    """The one that the tests of this file run in, one after the other."""
    with served(new_checkout()) as result:
        yield result


def await_process_of(checkout: Checkout, stage: str, pipeline: subprocess.Popen[bytes], before: int) -> int:
    """Process id of the stage's next attempt, once it is running."""
    deadline = time.monotonic() + STEP_SECONDS
    while time.monotonic() < deadline and pipeline.poll() is None:
        started = [row for row in checkout.attempts(stage) if row.attempt > before]
        if started:
            return started[-1].pid
        time.sleep(0.05)
    kill_9(*psutil.Process(pipeline.pid).children(recursive=True), psutil.Process(pipeline.pid))
    raise AssertionError(f"{stage} did not start: {checkout.said()}")


def kill_9(*processes: psutil.Process) -> None:
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=10)


def last_attempt(checkout: Checkout, stage: str) -> int:
    return max((row.attempt for row in checkout.attempts(stage)), default=0)


def run_killed_in(checkout: Checkout, stages: Sequence[str], left_behind: str) -> dict[str, Any]:
    """The result of a run that was killed in each of `stages`; the process of the stage `left_behind` was not, so that
    the next run has to let it checkpoint before it goes on.
    """
    for stage in stages:
        pipeline = checkout.start("run", "--recipe", str(TINY))
        await_process_of(checkout, stage, pipeline, before=0)
        if stage in TRAINING:
            await_checkpoint(checkout, stage)
        whole = psutil.Process(pipeline.pid)
        kill_9(whole, *([] if stage == left_behind else whole.children(recursive=True)))
        pipeline.wait()
    done = checkout.run("run", "--recipe", str(TINY), "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert [stage["stage"] for stage in result["stages"]] == list(STAGES)
    ends = {stage: [row.exit_code for row in checkout.attempts(stage) if row.event == "end"] for stage in STAGES}
    # left behind, a stage checkpoints as the next run asks it to, unless it is through by then
    checkpointed = left_behind in stages and last_attempt(checkout, left_behind) == 2
    assert ends == {stage: [75, 0] if stage == left_behind and checkpointed else [0] for stage in STAGES}
    killed = set(stages) - {left_behind}
    assert {stage: last_attempt(checkout, stage) for stage in set(STAGES) - {left_behind}} == {
        stage: 2 if stage in killed else 1 for stage in set(STAGES) - {left_behind}
    }
    resumed = {
        stage for stage in STAGES if any(row.event == "resume" and row.step > 0 for row in checkout.attempts(stage))
    }
    assert resumed >= TRAINING & killed
    assert [row.state for row in checkout.rows() if row.event == "end"] == [*["killed"] * len(stages), "completed"]
    return result


@pytest.mark.usefixtures("quick_stages")  # with real starts: the next one, and .ci/run
def test_a_pipeline_killed_in_training_completes_when_run_again(checkout: Checkout) -> None:
    result = run_killed_in(checkout, ["ppo"], left_behind="")
    scores = json.loads((checkout.root / "metrics" / "evaluate.json").read_text())
    assert scores["prompts"] == 16
    assert Path(result["report"]).stat().st_size > 10_000


@pytest.mark.slow
def test_a_pipeline_killed_in_each_stage_completes_when_run_again(new_checkout: Callable[[], Path]) -> None:
    with served(new_checkout()) as checkout:
        run_killed_in(checkout, STAGES, left_behind="reward")


def await_checkpoint(checkout: Checkout, stage: str) -> None:
    deadline = time.monotonic() + STEP_SECONDS
    while not list((checkout.root / "checkpoints" / stage).glob("*/step-*/manifest.json")):
        assert time.monotonic() < deadline, f"{stage} made no checkpoint"
        time.sleep(0.005)


@pytest.mark.usefixtures("quick_stages")
def test_an_auditor_agrees_with_every_figure_of_the_run(checkout: Checkout) -> None:
    """The ledger as JSON, the rows in MLflow, and the summary in Prefect, from the files alone."""
    content = json.loads(checkout.run("report", "--json").stdout)
    accounts = Accounts(checkout.root, content["run_id"])
    check_ledger(content, accounts)
    client = MlflowClient(f"sqlite:///{checkout.root / 'mlflow.db'}")
    shipped = runs_by_key(client)
    check_points(checkout.root, client, shipped)
    assert {run.info.status for key, run in shipped.items() if "/" in key} <= {"FINISHED", "KILLED"}
    check_summary(artifact(checkout, "result"), accounts)
    version = client.get_model_version_by_alias("helpdesk-assistant", "challenger")
    lock = yaml.safe_load((checkout.root / "dvc.lock").read_text())
    model = next(out for out in lock["stages"]["align@ppo"]["outs"] if out["path"] == "models/ppo")
    assert version.tags["dvc.digest"] == model["md5"]
    assert str(version.version) == "1"


def artifact(checkout: Checkout, key: str) -> str:
    """Prefect's newest artifact of a key."""
    login = base64.b64encode(api_key(checkout.root).encode()).decode()
    url = f"{prefect_api(checkout.root)}/artifacts/{key}/latest"
    result = httpx.get(url, headers={"Authorization": f"Basic {login}"}, timeout=STEP_SECONDS)
    return str(result.raise_for_status().json()["data"])


@pytest.mark.usefixtures("quick_stages")
def test_an_unchanged_rerun_starts_no_process_and_costs_nothing(checkout: Checkout) -> None:
    before = checkout.starts()
    done = checkout.run("run", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert checkout.starts() == before
    assert (result["total_seconds"], result["total_usd"]) == (0, 0)
    assert all(stage["cached"] for stage in result["stages"])


@pytest.mark.usefixtures("quick_stages")
def test_going_back_to_a_recipe_a_method_or_a_price_pays_for_nothing(checkout: Checkout) -> None:
    makers = []
    for changes in ([], ["seed=2"], ["seed=2", "align.method=dpo"], ["prices.usd_per_device_hour=7"]):
        before = checkout.starts()
        arguments = [argument for change in changes for argument in ("--set", change)]
        done = checkout.run("run", "--recipe", str(TINY), "--json", *arguments)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        makers.append({stage["stage"]: stage["made_by"] for stage in result["stages"] if stage["cached"]})
    assert makers[1] == {}, "every stage is made anew for another seed"
    second = [row.run_id for row in checkout.rows() if row.event == "start"][-3]
    assert makers[2] == dict.fromkeys(("data", "sft", "reward"), second)
    assert (makers[3], checkout.starts()) == (makers[0], before), "no process, and the runs that were paid"
    assert list(makers[0]) == list(STAGES)
    assert "Reused at no cost: data" in done.stderr
    assert dvc(checkout, "status", "--json") == {}


def test_dvc_has_nothing_to_say_after_a_run(checkout: Checkout) -> None:
    assert dvc(checkout, "status", "--json") == {}
    shown = dvc(checkout, "metrics", "show", "--json")[""]["data"]
    assert list(shown) == ["metrics/key.json"]
    scores = json.loads((checkout.root / "metrics" / "evaluate.json").read_text())
    result = shown["metrics/key.json"]["data"]
    assert result["evaluate"]["win_rate_reward"] == scores["win_rate_reward"]
    assert sum(len(numbers) for numbers in result.values()) < 20


def dvc(checkout: Checkout, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=checkout.root, check=True, capture_output=True)
    return dict(json.loads(done.stdout))


LOAD = """
import json, sys
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
generator = mlflow.transformers.load_model("models:/helpdesk-assistant@champion")
chats = [[{"role": "user", "content": prompt}] for prompt in json.loads(sys.argv[1])]
settings = {"do_sample": False, "max_new_tokens": 12, "return_full_text": False}
print(json.dumps([generator(chat, **settings)[0]["generated_text"].strip() for chat in chats]))
"""


@pytest.mark.usefixtures("quick_stages")
def test_a_promoted_model_is_loaded_from_the_registry(checkout: Checkout) -> None:
    done = checkout.run("promote", "last", "--yes", "--why", "a test")
    assert done.returncode == 0, done.stderr
    prompts = prompts_held_out(checkout, 4)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(prompts)], cwd=checkout.root, capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr
    talked = checkout.talk("champion", prompts, 12)
    replies = [line.strip() for line in talked.stdout.split("\n")[:-1]]
    assert json.loads(loaded.stdout) == replies


@pytest.mark.usefixtures("quick_stages")
def test_what_an_export_measured_is_in_the_report_and_in_the_registry(checkout: Checkout) -> None:
    done = checkout.run("export", "champion", "--to", str(checkout.root / "exported"))
    assert done.returncode == 0, done.stderr
    files = json.loads((checkout.root / "exported/export.json").read_text())["quantised"]
    client = MlflowClient(f"sqlite:///{checkout.root / 'mlflow.db'}")
    version = client.get_model_version_by_alias("helpdesk-assistant", "champion")
    champion = read_record(checkout.root).champion
    assert champion is not None
    assert checkout.run("report", champion.run_id, "--html").returncode == 0
    page = (checkout.root / "report/report.html").read_text()
    assert [file["kind"] for file in files] == ["f32", "q8_0", "q4_0"]
    for file in files:
        result = f"{file['flips']} of {file['prompts']}"
        assert f"{result} greedy replies are not" in version.tags[f"quantised.{file['kind']}"]
        assert result in page


@pytest.mark.usefixtures("quick_stages")
def test_a_benchmark_of_the_champion_is_planned_priced_and_kept(checkout: Checkout) -> None:
    done = checkout.run("bench", "--concurrency", "1,2", "--seconds", "1", "--slots", "2", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    champion = read_record(checkout.root).champion
    assert champion is not None
    assert (content["run_id"], content["model"]) == (champion.run_id, champion.run_id)
    assert [item["failed"] for item in content["loads"]] == [0, 0]
    assert all(item["planned_tokens_per_second"] > 0 for item in content["loads"])
    assert content["peak_bytes"] > 50e6
    assert content["planned_peak_bytes"] > 50e6
    kept = read_benchmarked(checkout.root, champion.run_id)
    assert kept is not None
    assert kept.model_digest == champion.model_digest
    client = MlflowClient(f"sqlite:///{checkout.root / 'mlflow.db'}")
    version = client.get_model_version_by_alias("helpdesk-assistant", "champion")
    assert "tokens/s at concurrency" in version.tags["served.llama_cpp-f32-2"]
    assert not (checkout.root / ".rlhf/served.jsonl").exists()  # a benchmark serves nobody


@pytest.mark.usefixtures("quick_stages")
def test_the_flow_serve_bench_leaves_a_table_and_a_line(checkout: Checkout) -> None:
    program = """
import os
from pathlib import Path
from tasks.servers.prefect_settings import own_server, settings
from tasks.servers.processes import prefect_api
api = prefect_api(Path())
os.environ.update(settings(Path(), api) | own_server(Path(), api))
from config.load import load
from flows.serve_bench import serve_bench
params = load(Path("params.yaml")).model_dump(mode="json")
state = serve_bench(params, concurrency=[1], seconds=1.0, slots=2, return_state=True)
print(state.name, "|", state.message)
wrong = serve_bench(params, run="nobody", return_state=True)
print(wrong.name, "|", wrong.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout.root, capture_output=True, text=True,
        timeout=STEP_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()[-2:]
    assert first.startswith("Measured | ")
    assert "tokens/s at concurrency 1" in first
    assert second.startswith("Failed | ")
    assert "nobody" in second


def test_another_checkout_takes_the_same_bytes_from_the_remote(checkout: Checkout, tmp_path: Path) -> None:
    clone = Checkout(tmp_path / "clone")
    git(tmp_path, "clone", "--quiet", str(checkout.root), str(clone.root))
    point_remote(clone.root, Path(remote_of(checkout.root)))
    done = clone.run("run", "--recipe", str(checkout.root / "params.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (clone.starts(), result["total_usd"]) == (0, 0)
    assert result["saved_usd"] > 0
    assert {stage["made_by"] for stage in result["stages"]} <= {row.run_id for row in checkout.rows()}
    for name in ("data/prepared", "models/ppo", "metrics/evaluate.json", "evaluation/samples.jsonl"):
        assert content(clone.root / name) == content(checkout.root / name)
    assert not status_of_git(clone.root)


def status_of_git(root: Path) -> str:
    """What a run leaves in a clone, but for the files that hold the params of the run."""
    command = ["git", "status", "--porcelain", "--", ".", ":!params.yaml", ":!inputs/dvc.yaml"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("quick_stages")
def test_a_student_is_made_after_the_others_and_promoted_in_their_place(checkout: Checkout) -> None:
    before = checkout.starts()
    recipe = checkout.root / "student.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "extends": str(checkout.root / "params.yaml"),
                "distill": DISTILL | {"updates": 3},
                "tracking": {"model": "student"},
            }
        )
    )
    done = checkout.run("run", "--json", "--recipe", str(recipe))
    assert done.returncode == 0, done.stderr
    result = {stage["stage"]: stage["cached"] for stage in json.loads(done.stdout)["stages"]}
    assert result == dict.fromkeys(STAGES, True) | {"distill": False, "evaluate": False}
    assert checkout.starts() == before + 1  # evaluate, beside distill, which STAGES has not
    assert dvc(checkout, "status", "--json") == {}
    again = checkout.run("run", "--json")
    assert all(stage["cached"] for stage in json.loads(again.stdout)["stages"])
    promoted = checkout.run("promote", "last", "--yes", "--why", "a test")
    assert promoted.returncode == 0, promoted.stderr
    champion = read_record(checkout.root).champion
    assert champion is not None
    lock = yaml.safe_load((checkout.root / "dvc.lock").read_text())["stages"]["distill"]
    assert champion.model_digest == next(out["md5"] for out in lock["outs"] if out["path"] == "models/distill")
    version = MlflowClient(f"sqlite:///{checkout.root / 'mlflow.db'}").get_model_version_by_alias(
        "helpdesk-assistant", "champion"
    )
    assert version.tags["dvc.digest"] == champion.model_digest
    assert len(checkout.talk("champion", prompts_held_out(checkout, 3), 8).stdout.splitlines()) == 3


@pytest.mark.usefixtures("quick_stages")
@pytest.mark.slow
def test_the_model_is_used_as_the_document_says_and_as_rlhf_chat_does(checkout: Checkout) -> None:
    document = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", document, re.DOTALL)[-1]
    prompts = prompts_held_out(checkout, 8)
    assert "My camera is broken." in snippet
    code = snippet.replace('"My camera is broken."', "prompt").replace("\n", "\n    ")
    program = f"for prompt in {prompts!r}:\n    {code}"
    used = subprocess.run([sys.executable, "-c", program], cwd=checkout.root, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    talked = checkout.talk("last", prompts, 40)
    assert used.stdout.split() == talked.stdout.split() != []


def prompts_held_out(checkout: Checkout, count: int) -> list[str]:
    rows = (checkout.root / "data/prepared/prompts/test.jsonl").read_text().splitlines()[:count]
    return [json.loads(row)["prompt"] for row in rows]


def remote_of(root: Path) -> str:
    line = next(line for line in (root / ".dvc" / "config.local").read_text().splitlines() if "url" in line)
    return line.split("=", 1)[1].strip()


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_the_tiny_recipe_is_valid() -> None:
    assert isinstance(Params.model_validate(yaml.safe_load(TINY.read_text())), Params)
