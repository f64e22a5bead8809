"""The serving plan: from what was measured of the champion, and from a roofline."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.load import load, write
from config.records import kept_folder
from config.schema import Params
from config.workspace.benchmarked import keep_benchmark
from config.workspace.champions import Champion, ChampionRecord, write_record
from costs.planning.serving import Lengths, ServingPlan, measured_here, plan_serving, served_shape
from costs.planning.target import Target
from costs.tables.catalogue import hardware, own_price, price
from tests.conftest import ROOT
from tests.support.benchmarks import benchmark


@pytest.fixture
def params() -> Params:
    larger = ["width=256", "layers=6", "mlp_width=768", "vocab_size=4096"]
    return load(ROOT / "recipes/demo.yaml", [f"model.random.{item}" for item in larger])


LENGTH = Lengths(30.0, 25.0)
RUN = "20261124-120000-brave-otter"
CHAMPION = Champion(run_id=RUN, method="ppo", model_digest="m", data_version="d", data_key="k")


def planned(params: Params, **settings: object) -> ServingPlan:
    target = Target(hardware("cpu"), own_price(0.36, "a test", "today"))
    wanted: dict[str, object] = {"weights": "f32", "slots": 16, "concurrencies": (1, 4, 16), "lengths": LENGTH}
    return plan_serving(params, target, **(wanted | settings))  # type: ignore[arg-type]


def test_a_cpu_reads_every_weight_for_each_token(params: Params) -> None:
    shape, (alone, *_) = served_shape(params, Path()), planned(params).loads
    read = 4 * shape.parameters / hardware("cpu").bandwidth_bytes_per_second
    assert 0.3 < read / alone.tpot_seconds < 1.0
    smaller = planned(params, weights="q4_0").loads[0]
    assert smaller.tpot_seconds < alone.tpot_seconds
    assert alone.usd_per_million_tokens == pytest.approx(1e6 * 0.36 / 3600 / alone.replies_per_second / 55)


def test_a_batch_is_never_larger_than_the_slots(params: Params) -> None:
    few, many = (planned(params, slots=n, concurrencies=(16,)).loads[0] for n in (4, 16))
    assert few.tokens_per_second < many.tokens_per_second
    assert planned(params, slots=4).peak_bytes < planned(params).peak_bytes


def test_memory_is_weights_cache_buffers_and_processes(params: Params) -> None:
    shape, result = served_shape(params, Path()), planned(params, slots=2)
    context = params.model.context_length
    cache = 2 * shape.layers * shape.kv_width * 4 * context
    buffers = 4 * (60 * (2 * 4 * 2 * context + 3 * 768 + 6 * 256) + 2 * 4096)
    assert result.cache_bytes_per_request == cache
    assert result.peak_bytes == pytest.approx(96e6 + 4 * shape.parameters + 2 * cache + buffers)
    room = result.usable_bytes - (result.peak_bytes - 2 * cache)
    assert result.requests_that_fit == int(room / cache)


@pytest.mark.parametrize(("rate", "devices"), [(0.5, 1), (8.0, 1), (4000.0, None)])
def test_a_rate_gets_as_few_devices_as_answer_it(params: Params, rate: float, devices: int | None) -> None:
    result = planned(params, requests_per_second=rate)
    assert result.rate is not None
    if devices is not None:
        assert result.rate.devices == devices
    most = result.loads[-1].replies_per_second
    assert result.rate.utilisation <= 0.8
    assert (result.rate.devices - 1) * 0.8 * most < rate <= result.rate.devices * 0.8 * most
    # Little's law
    item = rate / result.rate.devices
    assert result.rate.concurrency == pytest.approx(item * result.rate.reply_seconds)
    assert result.rate.usd_per_month == pytest.approx(result.rate.devices * 0.36 * 730)
    assert result.rate.usd_per_million_tokens == pytest.approx(1e6 * result.rate.devices * 0.36 / 3600 / rate / 55)


@pytest.fixture
def served(tmp_path: Path, params: Params) -> Path:
    """A project whose champion was benchmarked."""
    (kept_folder(tmp_path, RUN)).mkdir(parents=True)
    write(params, kept_folder(tmp_path, RUN) / "params.yaml")
    keep_benchmark(tmp_path, RUN, "a digest", benchmark("f32", {1: 100.0, 4: 240.0}))
    write_record(tmp_path, ChampionRecord(lineage=(CHAMPION,)))
    return tmp_path


def test_what_was_measured_of_the_champion_is_its_plan(served: Path, params: Params) -> None:
    measured = measured_here(served, params, "f32", 16)
    assert measured is not None
    result = planned(params, slots=16, measured=measured, requests_per_second=1.0)
    assert [item.tokens_per_second for item in result.loads] == [100.0, 240.0]
    assert {item.bound for item in result.loads} == {"measured"}
    assert f"rlhf bench at {measured.time}" in result.assumptions[0]
    assert result.rate is not None
    assert result.rate.reply_seconds == pytest.approx(1 / measured.loads[0].replies_per_second)
    # at the target's price, whatever was paid then
    dearer = planned(params, slots=16, measured=measured.model_copy(update={"usd_per_hour": 99.0}))
    assert dearer.loads == result.loads


def test_a_benchmark_of_arrival_rates_alone_says_nothing_of_concurrency(params: Params) -> None:
    rates = benchmark("f32", {1: 100.0})
    rates = rates.model_copy(
        update={"loads": tuple(load.model_copy(update={"concurrency": None}) for load in rates.loads)}
    )
    result = planned(params, measured=rates, requests_per_second=1.0)
    assert result == planned(params, requests_per_second=1.0)


def test_no_benchmark_is_taken_of_other_weights_slots_or_models(served: Path, params: Params, tmp_path: Path) -> None:
    assert measured_here(served, params, "q8_0", 4) is None
    assert measured_here(served, params, "f32", 8) is None
    assert measured_here(served, load(ROOT / "recipes/demo.yaml"), "f32", 4) is None
    assert measured_here(tmp_path / "elsewhere", params, "f32", 4) is None
    (kept_folder(served, RUN) / "params.yaml").unlink()
    assert measured_here(served, params, "f32", 16) is None


def test_a_gpu_is_planned_by_its_roofline(tmp_path: Path) -> None:
    params = load(ROOT / "recipes/gpu-80gb.yaml")
    target = Target(hardware("h100-sxm"), price("h100-sxm"), root=tmp_path)
    serving = plan_serving(params, target, "f32", 64, (1, 64), 5.0, Lengths(500, 200))
    assert (serving.engine, serving.weights) == ("vllm", params.model.dtype)
    shape = served_shape(params, tmp_path)
    alone = 1 / (serving.loads[0].tpot_seconds)
    bandwidth = target.hardware.bandwidth_bytes_per_second
    # one at a time, every weight is read for each token
    assert 0.4 < alone * 2 * shape.parameters / bandwidth < 1.0
    assert serving.loads[1].tokens_per_second > 20 * serving.loads[0].tokens_per_second
    assert serving.loads[0].bound == "bandwidth"
    assert serving.requests_that_fit > 0
    assert serving.assumptions


def test_the_command_plans_a_server() -> None:
    runner = CliRunner()
    words = ["plan", "serve", "--recipe", str(ROOT / "recipes/demo.yaml"), "--json"]
    invocation = runner.invoke(app, [*words, "--requests-per-second", "5"], catch_exceptions=False)
    content = json.loads(invocation.stdout)
    assert content["stage"] == "serve"
    assert [item["concurrency"] for item in content["loads"]] == [1, 2, 4, 8, 16]
    assert content["rate"]["devices"] >= 1
