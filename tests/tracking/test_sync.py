"""Shipping to a real MLflow on SQLite: every row once, whenever it was up."""

import http.server
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from config.errors import EnvironmentFault
from config.load import load, write
from config.ports import free_port
from config.schema import Params
from config.workspace.benchmarked import keep_benchmark
from tests.conftest import ROOT
from tests.support.benchmarks import benchmark
from tests.support.clock import Clock
from tracking import sync as module
from tracking.client import Connection, log_folder
from tracking.cursor import cursor_path
from tracking.lineage import content_digest, model_folders
from tracking.runs_view import VIEW_TAG, view
from tracking.shipper import Shipper
from tracking.sync import sync

pytestmark = pytest.mark.integration

DIGEST = "0123456789abcdef0123456789abcdef.dir"
MODEL_DIGEST = "c34277cb8ccdf6e5ddd319496567fac2.dir"
"""What DVC gives a folder with the file config.json that holds {}."""


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def params() -> Params:
    return load(ROOT / "recipes" / "demo.yaml")


def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


def runs(root: Path) -> dict[str, Any]:
    """What each MLflow run stands for -> the run; none may stand for the same."""
    experiments = client(root).search_experiments(filter_string="name = 'rlhf-ledger'")
    result = client(root).search_runs([experiments[0].experiment_id]) if experiments else []
    by_key = {run.data.tags["rlhf.key"].split("/", 1)[1]: run for run in result}
    assert len(by_key) == len(result)
    return by_key


class Story:
    """Writes what a pipeline run leaves on the disk, bit by bit."""

    def __init__(self, root: Path, params: Params, run_id: str = "r1", now: float = 1.8e9) -> None:
        self.root, self.params, self.run_id = root, params, run_id
        self.clock = Clock(root, run_id, now)
        self.pipeline = self.clock.pipeline

    def start(self) -> None:
        folder = self.root / "runs" / "pipeline" / self.run_id
        folder.mkdir(parents=True)
        write(self.params, folder / "params.yaml")
        self.pipeline("start", detail={"dvc.remote": "/remote", "git.commit": "abc", "git.dirty": "False"})

    def attempt(self, event: str, attempt: int = 1, stage: str = "ppo", code: int | None = None) -> None:
        self.clock.attempt(stage, attempt, event, exit_code=code)

    def steps(self, first: int, last: int, attempt: int = 1, stage: str = "ppo") -> None:
        for step in range(first, last + 1):
            self.clock.log(stage, attempt, step, score=step / 10, kl=float(step))
            self.clock.use(stage, attempt, "rollout", step, 3.6, 10, 1)

    def model(self, config: str = "{}") -> None:
        folder = self.root / "models" / "ppo"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config)
        lock = {"stages": {"ppo": {"outs": [{"path": "models/ppo", "md5": content_digest(folder)}]}}}
        for place in (self.root, self.root / "runs" / "pipeline" / self.run_id):
            (place / "dvc.lock").write_text(yaml.safe_dump(lock))

    def end(self, state: str = "completed") -> None:
        folder = self.root / "runs" / "pipeline" / self.run_id / "metrics"
        folder.mkdir()
        (folder / "evaluate.json").write_text('{"gold_sft": 0.5, "gold_aligned": 0.9, "reward_hacking": false}')
        self.pipeline("end", state=state)

    def whole(self) -> None:
        self.start()
        self.pipeline(
            "stage",
            stage="data",
            cached=True,
            attempt=4,
            detail={"outs": {"data/prepared": DIGEST, "metrics/data.json": "1"}},
        )
        self.attempt("start")
        self.steps(1, 3)
        self.attempt("end", code=0)
        self.pipeline(
            "stage", stage="ppo", attempt=1, detail={"outs": {"models/ppo": DIGEST}, "deps": {"models/sft": "f" * 32}}
        )
        self.model()
        self.pipeline("stage", stage="evaluate", cached=True, attempt=1)
        self.end()


def history(root: Path, key: str, metric: str) -> list[tuple[int, float]]:
    run = runs(root)[key]
    return sorted((point.step, point.value) for point in client(root).get_metric_history(run.info.run_id, metric))


def test_a_value_that_is_not_a_number_arrives_with_its_row(root: Path, params: Params) -> None:
    story = Story(root, params)
    story.start()
    story.attempt("start")
    story.steps(1, 1)
    story.clock.log("ppo", 1, 2, score=math.nan, kl=2.0)
    sync(root, params)
    assert history(root, "r1/ppo/1", "ppo/kl") == [(1, 1.0), (2, 2.0)]
    (first, second) = history(root, "r1/ppo/1", "ppo/score")
    assert (first, second[0], math.isnan(second[1])) == ((1, 0.1), 2, True)


SCORES = [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_run_that_failed_has_no_results_of_another(root: Path, params: Params) -> None:
    """The copies are those that an earlier version kept of whatever lay in the workspace."""
    story = Story(root, params)
    story.start()
    story.pipeline(
        "stage", stage="data", cached=True, attempt=4, detail={"outs": {"metrics/data.json": "another digest"}}
    )
    story.end("failed")
    (root / "runs/pipeline/r1/metrics/data.json").write_text('{"rows_read": 7}')
    sync(root, params)
    result = runs(root)["r1"]
    assert result.info.status == "FAILED"
    assert [name for name in result.data.metrics if name.startswith(("eval/", "ppo/", "data/"))] == []


def test_whole_runs_are_found_named_described_and_say_what_they_changed(root: Path, params: Params) -> None:
    Story(root, params).whole()
    (root / "runs/pipeline/r1/summary.md").write_text("### Verdict\n\n![key picture](key.svg)\n")
    (root / "runs/pipeline/r1/key.svg").write_text("<svg/>")
    # Python splits text at both of these, JSON lines are split at neither
    odd = "on\u2028its\u0085way."
    samples = [{"prompt": "where is it?", "sft": "no.", "aligned": odd}, {"prompt": "x"}]
    (root / "runs/pipeline/r1/evaluation").mkdir()
    (root / "runs/pipeline/r1/evaluation/samples.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
    )
    sync(root, params)
    another = params.model_copy(
        update={"seed": params.seed + 1, "align": params.align.model_copy(update={"method": "dpo"})}
    )
    Story(root, another, "20270116-080000-brave-otter", now=1.9e9).start()
    sync(root, params)
    experiment = client(root).get_experiment_by_name("rlhf-ledger")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert experiment.tags[VIEW_TAG] == view()
    result = client(root).search_runs(
        [experiment.experiment_id], "tags.`rlhf.kind` = 'run'", order_by=["attributes.start_time"]
    )
    assert [run.info.run_name for run in result] == ["r1 (ppo)", "brave-otter (dpo)"]
    assert [run.data.tags["rlhf.changed"] for run in result] == ["first run", "seed: 1 → 2, align.method: ppo → dpo"]
    assert runs(root)["r1/ppo/1"].info.run_name == "ppo of r1"
    assert (
        result[0]
        .data.tags["mlflow.note.content"]
        .endswith(f"(get-artifact?path=key.svg&run_uuid={result[0].info.run_id})")
    )
    assert "key.svg" in {item.path for item in client(root).list_artifacts(result[0].info.run_id)}
    logged = json.loads(result[0].data.tags["mlflow.loggedArtifacts"])
    assert logged == [{"path": "samples.json", "type": "table"}]
    stored = client(root).download_artifacts(result[0].info.run_id, "samples.json")
    table = json.loads(Path(stored).read_text())
    assert table["columns"] == ["prompt", "sft", "aligned"]
    assert table["data"] == [["where is it?", "no.", odd], ["x", None, None]]
    version = client(root).get_model_version_by_alias("helpdesk-assistant", "challenger")
    assert version.description.startswith("### Verdict")
    assert f"models:/helpdesk-assistant/{version.version}" in version.description
    assert "key.svg" not in version.description


def test_an_adapter_arrives_with_its_base_where_that_is_in_the_project(root: Path, params: Params) -> None:
    (root / "models/ppo").mkdir(parents=True)
    (root / "models/ppo/adapter_config.json").write_text('{"base_model_name_or_path": "../../bases/small"}')
    (root / "bases/small").mkdir(parents=True)
    (root / "bases/small/config.json").write_text("{}")
    Story(root, params).whole()
    sync(root, params)
    run_id = runs(root)["r1"].info.run_id
    result = {
        folder: {item.path for item in client(root).list_artifacts(run_id, folder)}
        for folder in ("model", "model/models")
    }
    assert result == {"model": {"model/models", "model/bases"}, "model/models": {"model/models/ppo"}}
    version = client(root).get_model_version_by_alias(params.tracking.registered_model, "challenger")
    assert version.tags["rlhf.model_folder"] == "models/ppo"


def test_an_adapters_bases_from_elsewhere_stay_there(root: Path) -> None:
    (root / "models/ppo").mkdir(parents=True)
    for base in ("organisation/model", "/elsewhere/model", "../../../outside"):
        (root / "models/ppo/adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
        assert model_folders(root, "models/ppo") == ["models/ppo"]


def test_rows_arrive_once_however_often_they_are_shipped_while_the_run_is_at_work(root: Path, params: Params) -> None:
    story = Story(root, params)
    story.start()
    story.attempt("start")
    for first, last in ((1, 1), (2, 3)):
        story.steps(first, last)
        assert sync(root, params) > 0
        assert sync(root, params) == 0
    assert runs(root)["r1/ppo/1"].info.status == "RUNNING"
    assert history(root, "r1/ppo/1", "ppo/score") == SCORES
    assert history(root, "r1/ppo/1", "usd_so_far") == [(step, pytest.approx(step * 1e-4)) for step in (1, 2, 3)]


@pytest.mark.parametrize("lost", ["cursor lost", "killed before the cursor was written"])
def test_shipping_again_after_a_kill_stores_nothing_twice(
    root: Path, params: Params, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Story(root, params).whole()
    if lost == "cursor lost":
        sync(root, params)
        cursor_path(root, params.tracking.uri).unlink()
    else:
        with monkeypatch.context() as patched:
            patched.setattr(module, "save", lambda *_: None)
            sync(root, params)
    sync(root, params)
    assert history(root, "r1/ppo/1", "ppo/score") == SCORES
    assert len(history(root, "r1/ppo/1", "usd_so_far")) == len(SCORES)
    assert len(history(root, "r1", "cost/usd")) == 1
    assert len(runs(root)) == 2
    assert len(client(root).search_model_versions(f"name = '{params.tracking.registered_model}'")) == 1


def test_the_same_model_gets_no_second_version_and_another_does(root: Path, params: Params) -> None:
    Story(root, params).whole()
    for run_id, config in (("r2", "{}"), ("r3", '{"another": "model"}')):
        story = Story(root, params, run_id)
        story.start()
        story.model(config)
        story.end()
        sync(root, params)
    versions = client(root).search_model_versions(f"name = '{params.tracking.registered_model}'")
    assert sorted(version.tags["rlhf.run_id"] for version in versions) == ["r1", "r3"]
    newest = client(root).get_model_version_by_alias(params.tracking.registered_model, "challenger")
    assert newest.tags["rlhf.run_id"] == "r3"


def test_a_model_that_was_replaced_before_it_could_be_shipped_is_said_to_be(root: Path, params: Params) -> None:
    Story(root, params).whole()
    (root / "models" / "ppo" / "config.json").write_text('{"another": "model"}')
    sync(root, params)
    assert runs(root)["r1"].data.tags["rlhf.model"].startswith("not registered")
    assert client(root).search_registered_models() == []


def test_an_attempt_that_was_killed_does_not_stay_running(root: Path, params: Params) -> None:
    story = Story(root, params)
    story.start()
    story.attempt("start")
    story.steps(1, 2)
    sync(root, params)
    story.attempt("start", attempt=2)
    story.steps(2, 3, attempt=2)
    sync(root, params)
    assert {key: run.info.status for key, run in runs(root).items()} == {
        "r1": "RUNNING",
        "r1/ppo/1": "KILLED",
        "r1/ppo/2": "RUNNING",
    }
    story.end("stopped")
    sync(root, params)
    statuses = {key: run.info.status for key, run in runs(root).items()}
    assert statuses == {"r1": "KILLED", "r1/ppo/1": "KILLED", "r1/ppo/2": "KILLED"}
    assert history(root, "r1/ppo/2", "ppo/score") == SCORES[1:]


def test_the_end_of_a_run_whose_results_are_being_written_waits(root: Path, params: Params) -> None:
    Story(root, params).whole()
    sync(root, params, at_work="r1")
    assert runs(root)["r1"].info.status == "RUNNING"
    sync(root, params)
    assert runs(root)["r1"].info.status == "FINISHED"


def test_stages_started_by_hand_are_tracked_too(root: Path, params: Params) -> None:
    story = Story(root, params, "manual")
    story.attempt("start")
    story.steps(1, 3)
    story.attempt("end", code=2)
    sync(root, params)
    assert runs(root)["manual/ppo/1"].info.status == "FAILED"
    assert history(root, "manual/ppo/1", "ppo/score") == SCORES
    assert runs(root)["manual"].info.status == "FAILED"  # nobody else would say that it ended
    story.attempt("start", attempt=2)
    sync(root, params)
    assert runs(root)["manual"].info.status == "RUNNING"
    story.attempt("end", attempt=2, code=0)
    sync(root, params)
    assert runs(root)["manual"].info.status == "FINISHED"


def test_an_unreachable_mlflow_is_one_line_and_the_rows_are_shipped_later(root: Path, params: Params) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    away = params.model_copy(update={"tracking": params.tracking.model_copy(update={"uri": uri})})
    Story(root, away).whole()
    with pytest.raises(EnvironmentFault, match=r"rlhf report --sync") as fault:
        sync(root, away)
    assert "\n" not in str(fault.value)
    sync(root, params)
    assert history(root, "r1/ppo/1", "ppo/score") == SCORES


@pytest.fixture
def shipper() -> Callable[[Path, Params], Shipper]:
    def make(root: Path, params: Params) -> Shipper:
        result = Shipper(root, params, "r1")
        result.EVERY_SECONDS = 0.1
        return result

    return make


def test_the_background_shipper_ships_while_it_runs_and_the_rest_at_the_end(
    root: Path, params: Params, shipper: Callable[[Path, Params], Shipper]
) -> None:
    story = Story(root, params)
    story.start()
    background = shipper(root, params)
    background.start()
    story.attempt("start")
    story.steps(1, 1)
    deadline = time.monotonic() + 30
    while "r1/ppo/1" not in runs(root) and time.monotonic() < deadline:
        time.sleep(0.05)
    story.steps(2, 3)
    story.end()
    assert background.finish(lambda: time.monotonic() > deadline) is None
    assert history(root, "r1/ppo/1", "ppo/score") == SCORES
    assert runs(root)["r1"].info.status == "FINISHED"


def test_the_background_shipper_waits_for_a_long_pass_until_somebody_gives_up(
    root: Path, params: Params, shipper: Callable[[Path, Params], Shipper], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = threading.Event()
    monkeypatch.setattr(module, "sync", lambda *_, **__: shipped.wait(60))
    background, answers = shipper(root, params), iter([False] * 3 + [True] * 9)
    background.start()
    fault = background.finish(lambda: next(answers))
    assert fault is not None
    assert "rlhf report --sync" in fault
    shipped.set()
    assert background.finish(lambda: False) is None


class SlowStore(http.server.BaseHTTPRequestHandler):
    """Takes an artifact, and answers only when it is where it is kept."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(3)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_an_artifact_whose_server_takes_its_time_to_keep_it_arrives(
    root: Path, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"0" * 1000)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowStore) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/api/2.0/mlflow-artifacts/artifacts"
        experiment = client(root).create_experiment("slow", artifact_location=place)
        connection = Connection(client(root), experiment)
        log_folder(connection, connection.client.create_run(experiment).info.run_id, tmp_path / "model", "model")
        server.shutdown()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"


@pytest.mark.parametrize("purged", [False, True])
def test_a_run_that_was_deleted_in_mlflow_does_not_hold_the_others_up(
    root: Path, params: Params, purged: bool
) -> None:
    deleted = Story(root, params)
    deleted.start()
    deleted.attempt("start")
    deleted.steps(1, 1)
    sync(root, params)
    for key in ("r1", "r1/ppo/1"):
        run_id = runs(root)[key].info.run_id
        client(root).delete_run(run_id)
        if purged:
            client(root)._tracking_client.store._hard_delete_run(run_id)
    deleted.steps(2, 3)
    deleted.attempt("end", code=0)
    deleted.pipeline("stage", stage="data", cached=True, attempt=4, detail={"outs": {"data/prepared": DIGEST}})
    deleted.pipeline("stage", stage="ppo", attempt=1, detail={"outs": {}, "deps": {"models/sft": "f" * 32}})
    deleted.model()
    deleted.end()
    other = Story(root, params, "r2", now=1.9e9)
    other.start()
    other.steps(1, 3)
    other.end()
    sync(root, params)
    assert sync(root, params) == 0
    assert set(runs(root)) == {"r2", "r2/ppo/1"}
    assert runs(root)["r2"].info.status == "FINISHED"
    assert client(root).search_registered_models() == []


def test_a_benchmark_arrives_on_the_run_and_on_the_model_version(root: Path, params: Params) -> None:
    Story(root, params).whole()
    sync(root, params)
    page = client(root).get_model_version(params.tracking.registered_model, "1").description
    keep_benchmark(root, "r1", MODEL_DIGEST, benchmark("f32", {1: 100.0, 4: 250.0}))
    keep_benchmark(root, "r1", MODEL_DIGEST, benchmark("q8_0", {1: 120.0, 4: 300.0}))
    for _ in range(2):  # the second time nothing is new
        sync(root, params)
    speed = "serve/llama_cpp-f32-16/tokens_per_second"
    assert history(root, "r1", speed) == [(1, 100.0), (4, 250.0)]
    usd = "serve/llama_cpp-f32-16/usd_per_million_tokens"
    # 3.6 USD an hour, 100 output and 200 input tokens in each second
    assert dict(history(root, "r1", usd))[1] == pytest.approx(3.6 / 3600 / 300 * 1e6)
    run = runs(root)["r1"].info.run_id
    table = json.loads(Path(client(root).download_artifacts(run, "served.json")).read_text())
    assert len(table["data"]) == 4
    assert "requests per second" not in table["columns"]  # none arrived at a rate
    version = client(root).get_model_version(params.tracking.registered_model, "1")
    assert "100 tokens/s at concurrency 1" in version.tags["served.llama_cpp-f32-16"]
    assert version.description.startswith(page.rstrip())
    assert version.description.count("### Served") == 1
    assert version.description.count("\n- llama_cpp-") == 2
