"""The serving plan: from rates that a known machine would measure, and from a roofline."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from config.load import load
from config.schema import Params
from config.workspace.machine import SERVING_FILE, ServedPoint, ServingRates
from costs.planning.serving import ServingPlan, plan_serving, served_shape
from costs.planning.serving_pace import Lengths, matrix_parameters
from costs.planning.target import Target
from costs.tables.catalogue import hardware, own_price, price
from tests.conftest import ROOT

PREFILL, LAUNCH = 4e-10, 2e-5
"""Seconds: for a token and parameter; for a layer of a step."""
STEP = {1: 2e-10, 4: 5e-10, 16: 16e-10}
"""Seconds of a step for each parameter, by batch."""
FIXED = {1: 8e-3, 4: 5e-3, 16: 4e-3}
EACH = {1: 5e-4, 4: 3e-4, 16: 2e-4}
SMALL = (369_408, 3)
DEEP, LARGE = (700_000, 16), (27_000_000, 8)


def seconds(parameters: int, layers: int, batch: int, length: Lengths) -> float:
    """What a reply takes on that machine."""
    size, more = parameters - SMALL[0], layers - SMALL[1]
    return (
        FIXED[batch] + EACH[batch] * length.output + PREFILL * length.input * size
        + length.output * (LAUNCH * more + STEP[batch] * size) / batch
    )  # fmt: skip


def point(model: tuple[int, int], batch: int, read: float, written: float) -> ServedPoint:
    length = Lengths(read, written)
    return ServedPoint(
        weights="f32", parameters=model[0], layers=model[1], concurrency=batch,
        input_tokens=read, output_tokens=written,
        seconds_per_reply=seconds(*model, batch, length),
        ttft_seconds=5e-3 + PREFILL * read * model[0],
    )  # fmt: skip


RATES = ServingRates(
    pace_seconds=0.2,
    processor="one that is known",
    date="2026-11-24",
    small=tuple(point(SMALL, n, 20, length) for length in (16, 40) for n in STEP),
    deep=tuple(point(DEEP, n, 20, 40) for n in STEP),
    large=(*(point(LARGE, n, 20, 24) for n in STEP), point(LARGE, 1, 170, 4)),
    process_bytes=100_000_000,
    seconds=80.0,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / SERVING_FILE).parent.mkdir()
    (tmp_path / SERVING_FILE).write_text(yaml.safe_dump(RATES.model_dump(mode="json")))
    return tmp_path


@pytest.fixture
def params() -> Params:
    larger = ["width=256", "layers=6", "mlp_width=768", "vocab_size=4096"]
    return load(ROOT / "recipes/demo.yaml", [f"model.random.{item}" for item in larger])


LENGTH = Lengths(30.0, 25.0)


def planned(root: Path, params: Params, **settings: object) -> ServingPlan:
    target = Target(hardware("cpu"), own_price(0.36, "a test", "today"), root=root)
    wanted: dict[str, object] = {"slots": 16, "concurrencies": (1, 4, 16), "lengths": LENGTH}
    return plan_serving(params, target, "f32", **(wanted | settings))  # type: ignore[arg-type]


def test_a_third_model_is_planned_as_the_machine_would_serve_it(root: Path, params: Params) -> None:
    shape = served_shape(params, root)
    result = planned(root, params)
    assert result.calibrated
    for load_ in result.loads:
        item = seconds(matrix_parameters(shape), shape.layers, load_.concurrency, LENGTH)
        assert load_.tokens_per_second == pytest.approx(LENGTH.output / item, rel=1e-6)
        assert load_.usd_per_million_tokens == pytest.approx(1e6 * 0.36 / 3600 * item / 55)
    small = 5e-3 + PREFILL * 20 * SMALL[0]
    first = small + PREFILL * LENGTH.input * (matrix_parameters(shape) - SMALL[0])
    assert result.loads[0].ttft_seconds == pytest.approx(first, rel=1e-6)


def test_a_small_model_waits_for_the_front_and_a_large_one_for_the_engine(root: Path, params: Params) -> None:
    assert {item.bound for item in planned(root, params).loads} == {"engine"}
    small = load(ROOT / "recipes/demo.yaml")
    assert {item.bound for item in planned(root, small).loads} == {"front"}


def test_a_batch_is_never_larger_than_the_slots(root: Path, params: Params) -> None:
    few, many = (planned(root, params, slots=n, concurrencies=(16,)).loads[0] for n in (4, 16))
    assert few.tokens_per_second < many.tokens_per_second
    assert planned(root, params, slots=4).peak_bytes < planned(root, params).peak_bytes


def test_a_machine_that_is_slower_now_serves_less(root: Path, params: Params) -> None:
    usual, slow = planned(root, params), planned(root, params, pace_seconds=0.3)
    assert slow.slower == pytest.approx(1.5)
    for usual_load, other in zip(usual.loads, slow.loads, strict=True):
        assert other.tokens_per_second == pytest.approx(usual_load.tokens_per_second / 1.5)


def test_memory_is_weights_cache_buffers_and_processes(root: Path, params: Params) -> None:
    shape, result = served_shape(params, root), planned(root, params, slots=2)
    context = params.model.context_length
    cache = 2 * shape.layers * shape.kv_width * 4 * context
    buffers = 4 * (60 * (2 * 4 * 2 * context + 3 * 768 + 6 * 256) + 2 * 4096)
    assert result.cache_bytes_per_request == cache
    assert result.peak_bytes == pytest.approx(100e6 + 4 * shape.parameters + 2 * cache + buffers)


@pytest.mark.parametrize(("rate", "devices"), [(0.5, 1), (8.0, 1), (4000.0, None)])
def test_a_rate_gets_as_few_devices_as_answer_it(root: Path, params: Params, rate: float, devices: int | None) -> None:
    result = planned(root, params, requests_per_second=rate)
    assert result.rate is not None
    if devices is not None:
        assert result.rate.devices == devices
    most = 1 / (LENGTH.output / result.loads[-1].tokens_per_second)
    assert result.rate.utilisation <= 0.8
    assert (result.rate.devices - 1) * 0.8 * most < rate <= result.rate.devices * 0.8 * most
    # Little's law
    item = rate / result.rate.devices
    assert result.rate.concurrency == pytest.approx(item * result.rate.reply_seconds)
    assert result.rate.usd_per_month == pytest.approx(result.rate.devices * 0.36 * 730)
    if result.rate.concurrency > 1:
        at = planned(root, params, concurrencies=(round(result.rate.concurrency),)).loads[0]
        assert at.tokens_per_second / LENGTH.output == pytest.approx(item, rel=0.35)


def test_a_gpu_is_planned_by_its_roofline(tmp_path: Path) -> None:
    params = load(ROOT / "recipes/gpu-80gb.yaml")
    target = Target(hardware("h100-sxm"), price("h100-sxm"), root=tmp_path)
    serving = plan_serving(params, target, "f32", 64, (1, 64), 5.0, Lengths(500, 200))
    assert (serving.engine, serving.weights, serving.calibrated) == ("vllm", params.model.dtype, False)
    shape = served_shape(params, tmp_path)
    alone = 1 / (serving.loads[0].tpot_seconds)
    bandwidth = target.hardware.bandwidth_bytes_per_second
    # one at a time, every weight is read for each token
    assert 0.4 < alone * 2 * shape.parameters / bandwidth < 1.0
    assert serving.loads[1].tokens_per_second > 20 * serving.loads[0].tokens_per_second
    assert serving.loads[0].bound == "bandwidth"
    assert serving.requests_that_fit > 0
    assert serving.assumptions


def test_another_machines_rates_stand_in_where_nobody_measured(tmp_path: Path) -> None:
    result = planned(tmp_path, load(ROOT / "recipes/demo.yaml"))
    assert not result.calibrated
    assert "rlhf calibrate" in result.assumptions[0]
    assert 300 < result.loads[0].tokens_per_second < 3000  # this machine's: 650 to 1,400


def test_a_damaged_calibration_is_one_line(root: Path, params: Params) -> None:
    (root / SERVING_FILE).write_text("small: 3")
    with pytest.raises(Exception, match=r"serving.yaml is damaged .* Run rlhf calibrate again"):
        planned(root, params)


def test_the_command_plans_a_server() -> None:
    runner = CliRunner()
    words = ["plan", "serve", "--recipe", str(ROOT / "recipes/demo.yaml"), "--json"]
    invocation = runner.invoke(app, [*words, "--requests-per-second", "5"], catch_exceptions=False)
    content = json.loads(invocation.stdout)
    assert content["stage"] == "serve"
    assert [item["concurrency"] for item in content["loads"]] == [1, 2, 4, 8, 16]
    assert content["rate"]["devices"] >= 1
