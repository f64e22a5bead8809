"""Seconds: every bound of the roofline by hand."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.engines import engine
from costs.formulas.compute import Work
from costs.formulas.setting import Setting
from costs.formulas.time import decode_duration, duration, energy_kwh
from costs.planning.phases import step_seconds
from costs.planning.stages import plan_stage
from costs.tables.catalogue import price
from costs.tables.engines import Engine
from costs.tables.rates import Efficiency
from tests.costs.settings import sft, small_setting


def test_matrix_products_run_at_the_share_that_the_device_reaches() -> None:
    setting = sft(device="a100-80")
    seconds, bound = duration(Work(matmul_flops=312e12), setting)
    assert seconds == pytest.approx(1 / (0.76 * 0.87))
    assert bound == "compute"


def test_traffic_runs_at_the_share_of_the_bandwidth() -> None:
    seconds, bound = duration(Work(bytes_moved=2039e9), sft(device="a100-80"))
    assert seconds == pytest.approx(1 / 0.72)
    assert bound == "bandwidth"


def test_few_rows_are_bound_by_reading_the_weights() -> None:
    work = Work(matmul_flops=1e9, weight_bytes=2039e9)
    assert duration(work, sft(device="a100-80")).seconds == pytest.approx(1 / 0.72)


def test_small_operations_are_bound_by_launching_them() -> None:
    seconds, bound = duration(Work(matmul_flops=1e9, operations=10_000), sft(device="a100-80"))
    assert seconds == pytest.approx(0.17)
    assert bound == "launch"


def test_communication_hides_behind_computation_up_to_the_overlap() -> None:
    setting = sft(device="a100-80", gpus=8)
    compute = Work(matmul_flops=312e12)
    alone = duration(compute, setting).seconds
    hidden = duration(compute + Work(communicated_bytes=0.68 * 300e9), setting).seconds
    exposed = duration(compute + Work(communicated_bytes=6.8 * 300e9), setting).seconds
    assert hidden == pytest.approx(alone + 0.1)
    assert exposed == pytest.approx(10.0)


def test_across_nodes_all_network_cards_of_a_node_carry_a_collective() -> None:
    work = Work(communicated_bytes=1e12)
    inside, across = (duration(work, sft(device="a100-80", gpus=gpus)).seconds for gpus in (8, 16))
    assert across / inside == pytest.approx(300 / (8 * 25))


def test_unpacking_weights_comes_on_top_of_launching() -> None:
    setting = sft(device="a100-80", quantisation="nf4", tuning="lora")
    launch = duration(Work(operations=10_000), setting).seconds
    both = duration(Work(operations=10_000, dequantised_bytes=2039e9), setting).seconds
    assert both - launch == pytest.approx(4.0)


def test_decoding_one_token_of_a_7b_model_is_bound_by_bandwidth() -> None:
    # gpt-fast README, Llama-2-7B bf16 on one A100-80GB: 104.9 tokens/s
    setting = replace(sft("llama-7b", device="a100-80", tuning="frozen"), engine=engine("gpt-fast"))
    from costs.formulas.compute import decode_step

    seconds, bound = decode_duration(decode_step(setting, setting.model, setting.levers, 1, 100), setting)
    assert 1 / seconds == pytest.approx(104.9, rel=0.06)
    assert bound == "bandwidth"


def test_accumulation_repeats_the_pass_but_not_the_optimizer() -> None:
    once, four = (step_seconds(sft(accumulation=times, micro_batch=8)).seconds for times in (1, 4))
    assert 3.5 * once < four < 4 * once


def test_energy_is_board_power_times_hours() -> None:
    # arXiv 2302.13971 table 15: 36 MWh with a PUE of 1.1
    assert energy_kwh(gpu_hours=82_432, watts=400) == pytest.approx(36_000 / 1.1, rel=0.01)


def test_a_stage_costs_its_devices_times_hours_times_price() -> None:
    plan = plan_stage(sft(gpus=8, micro_batch=4), price("a100-80"))
    assert plan.gpu_hours == pytest.approx(plan.seconds * 8 / 3600)
    assert plan.usd.expected == pytest.approx(plan.gpu_hours * 1.5)
    assert sum(phase.usd for phase in plan.phases) == pytest.approx(plan.usd.expected)
    assert sum(phase.seconds for phase in plan.phases) == pytest.approx(plan.seconds)


# ---------------------------------------------------------------- by hand, at rates that all differ


def measuring(setting: Setting, overlap: float = 0.75, **software: Any) -> Setting:
    """A device of 100 FLOP/s in bf16 and 40 in fp32, 10 bytes/s of memory, 5 of link, 0.5 of network; a launch takes
    half a second.
    """
    return replace(
        setting,
        hardware=replace(
            setting.hardware,
            peak_flops_per_second=(("fp32", 40.0), ("bf16", 100.0)),
            bandwidth_bytes_per_second=10.0,
            link_bytes_per_second=5.0,
            network_bytes_per_second=0.5,
            attainable=0.5,
        ),
        efficiency=Efficiency(
            matmul=0.8,
            attention=0.25,
            bandwidth=0.5,
            decode=0.2,
            decode_int8=0.4,
            decode_4bit=0.1,
            dequantise=0.125,
            network=0.8,
            message_seconds=3.0,
            host_flops=0.3,
        ),
        engine=Engine("timed", op_seconds=0.5, overlap=overlap, **software),
    )


@pytest.mark.parametrize(
    ("work", "seconds", "bound"),
    [
        (Work(matmul_flops=80), 80 / 40, "compute"),
        (Work(attention_flops=80), 80 / 25, "compute"),
        (Work(bytes_moved=10), 10 / 5, "bandwidth"),
        (Work(weight_bytes=10), 10 / 5, "bandwidth"),
        (Work(matmul_flops=80, weight_bytes=9), 2.0, "compute"),
        (Work(matmul_flops=80, weight_bytes=11), 11 / 5, "compute"),
        (Work(matmul_flops=80, weight_bytes=25), 5.0, "bandwidth"),
        (Work(matmul_flops=80, attention_flops=25, bytes_moved=20), 2 + 1 + 4, "bandwidth"),
        (Work(matmul_flops=80, attention_flops=25, bytes_moved=10), 2 + 1 + 2, "compute"),
        (Work(matmul_flops=80, attention_flops=50, bytes_moved=20), 2 + 2 + 4, "bandwidth"),
        (Work(matmul_flops=80, operations=4), 2.0, "compute"),
        (Work(matmul_flops=80, operations=5), 2.5, "launch"),
        (Work(operations=5, dequantised_bytes=5), 2.5 + 4, "launch"),
        (Work(operations=5, paged_bytes=10), 2.5 + 2, "launch"),
        # a quarter of 2 s is not hidden; of 16 s, what computation does not cover
        (Work(matmul_flops=80, communicated_bytes=8), 2 + 0.5, "compute"),
        (Work(matmul_flops=80, communicated_bytes=64), 2 + 14, "communication"),
        (Work(operations=8, communicated_bytes=64), 4 + 12, "communication"),
        (Work(operations=8, communicated_bytes=28), 4 + 3, "launch"),
        (Work(matmul_flops=160, communicated_bytes=32), 4 + 4, "compute"),
        (Work(matmul_flops=40, messages=1), 1 + 2, "communication"),
        (Work(matmul_flops=400, communicated_bytes=16, messages=2), 10 + 2.5, "compute"),
    ],
)
def test_the_longest_of_device_and_launches_with_what_comes_on_top(work: Work, seconds: float, bound: str) -> None:
    result = duration(work, measuring(small_setting(gpus=8)))
    assert result.seconds == pytest.approx(seconds)
    assert result.bound == bound


def test_a_fast_link_is_no_faster_than_the_bus_of_the_host() -> None:
    setting = small_setting(device="a100-80")
    paged = duration(Work(paged_bytes=48e9), setting).seconds
    assert paged == pytest.approx(2.0)


def test_other_types_and_a_host_have_their_own_share_of_the_peak() -> None:
    work = Work(matmul_flops=80, attention_flops=30)
    fp32 = measuring(small_setting(dtype="fp32"))
    assert duration(work, fp32).seconds == pytest.approx(80 / (40 * 0.4) + 30 / (40 * 0.25))
    host = measuring(small_setting(device="cpu"))
    assert duration(work, host).seconds == pytest.approx(80 / (100 * 0.3) + 30 / (100 * 0.25))


@pytest.mark.parametrize(
    ("gpus", "network", "rate"), [(8, 0.5, 5.0), (16, 0.5, 8 * 0.5), (9, 0.5, 8 * 0.5), (16, 3.0, 5.0)]
)
def test_a_collective_over_nodes_is_no_faster_than_within_one(gpus: int, network: float, rate: float) -> None:
    setting = measuring(small_setting(gpus=gpus), overlap=0.0)
    setting = replace(setting, hardware=replace(setting.hardware, network_bytes_per_second=network))
    work = Work(communicated_bytes=8)
    assert duration(work, setting).seconds == pytest.approx(8 / (rate * 0.8))
    assert decode_duration(work, setting).seconds == pytest.approx(8 / (rate * 0.8))


@pytest.mark.parametrize(
    ("work", "seconds", "bound"),
    [
        (Work(weight_bytes=10), 10 / 2, "bandwidth"),
        (Work(bytes_moved=10), 10 / 5, "bandwidth"),
        (Work(weight_bytes=10, bytes_moved=10), 5 + 2, "bandwidth"),
        (Work(matmul_flops=80), 80 / 40, "compute"),
        (Work(attention_flops=80), 80 / 25, "compute"),
        (Work(matmul_flops=80, attention_flops=75, weight_bytes=8), 2 + 3, "compute"),
        (Work(matmul_flops=40, weight_bytes=8), 4, "bandwidth"),
        (Work(matmul_flops=80, weight_bytes=8), 4, "bandwidth"),
        (Work(matmul_flops=80, weight_bytes=6), 3, "compute"),
        (Work(weight_bytes=8, operations=8), 4, "bandwidth"),
        (Work(weight_bytes=8, operations=9), 4.5, "launch"),
        # nothing hides the collectives of a token
        (Work(weight_bytes=8, communicated_bytes=16), 4 + 4, "bandwidth"),
        (Work(weight_bytes=8, messages=2), 4 + 6, "communication"),
    ],
)
def test_a_decoding_step_is_the_longest_of_traffic_products_and_launches(
    work: Work, seconds: float, bound: str
) -> None:
    result = decode_duration(work, measuring(small_setting(gpus=8)))
    assert result.seconds == pytest.approx(seconds)
    assert result.bound == bound


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.4), ("nf4", 0.1), ("nf4-dq", 0.1), ("int4", 0.1)])
def test_unpacking_slows_the_reading_of_weights_in_a_decoding_step(storage: str, share: float) -> None:
    setting = measuring(small_setting(tuning="lora", quantisation=storage))
    result = decode_duration(Work(weight_bytes=10), setting).seconds
    assert result == pytest.approx(10 / (10 * share))


def test_a_step_from_a_graph_has_a_fixed_time_a_layer_and_short_collectives() -> None:
    setting = measuring(small_setting(gpus=8), decode_layer_seconds=0.25)
    assert decode_duration(Work(weight_bytes=8), setting).seconds == pytest.approx(4 + 3 * 0.25)
    graph = replace(setting, engine=replace(setting.engine, op_seconds=0.0))
    result = decode_duration(Work(weight_bytes=8, communicated_bytes=4, messages=2000), graph)
    assert result.seconds == pytest.approx(4 + 0.75 + 1 + 2000 * 5e-6)


@pytest.mark.parametrize("timed", [duration, decode_duration])
def test_a_cpu_launches_and_computes_one_after_the_other(timed: Any) -> None:
    on_cpu, on_gpu = (
        replace(setting, engine=replace(setting.engine, graphed_decoding=False))
        for setting in (small_setting(device="cpu"), small_setting())
    )
    device, launch = Work(matmul_flops=1e12), Work(operations=1e6)
    for setting in (on_cpu, on_gpu):
        alone = [timed(work, setting).seconds for work in (device, launch)]
        both = timed(device + launch, setting).seconds
        assert both == pytest.approx(sum(alone) if setting is on_cpu else max(alone))
