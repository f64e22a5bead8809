"""Seconds: every bound of the roofline by hand."""

from dataclasses import replace

import pytest

from costs.formulas.compute import Work
from costs.formulas.time import decode_duration, duration, energy_kwh
from costs.planning.stages import plan_stage, step_seconds
from costs.tables.catalogue import price
from costs.tables.engines import engine
from tests.costs.settings import sft


def test_matrix_products_run_at_the_share_that_the_device_reaches() -> None:
    setting = sft(device="a100-80")
    seconds, bound = duration(Work(matmul_flops=312e12), setting)
    assert seconds == pytest.approx(1 / (0.84 * 0.87))
    assert bound == "compute"


def test_traffic_runs_at_the_share_of_the_bandwidth() -> None:
    seconds, bound = duration(Work(bytes_moved=2039e9), sft(device="a100-80"))
    assert seconds == pytest.approx(1 / 0.8)
    assert bound == "bandwidth"


def test_few_rows_are_bound_by_reading_the_weights() -> None:
    work = Work(matmul_flops=1e9, weight_bytes=2039e9)
    assert duration(work, sft(device="a100-80")).seconds == pytest.approx(1 / 0.8)


def test_small_operations_are_bound_by_launching_them() -> None:
    seconds, bound = duration(Work(matmul_flops=1e9, operations=10_000), sft(device="a100-80"))
    assert seconds == pytest.approx(0.1)
    assert bound == "launch"


def test_communication_hides_behind_computation_up_to_the_overlap() -> None:
    setting = sft(device="a100-80", gpus=8)
    compute = Work(matmul_flops=312e12)
    alone = duration(compute, setting).seconds
    hidden = duration(compute + Work(communicated_bytes=0.7 * 300e9), setting).seconds
    exposed = duration(compute + Work(communicated_bytes=7 * 300e9), setting).seconds
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

    seconds, bound = decode_duration(
        decode_step(setting, setting.model, setting.levers, 1, 100), setting
    )
    assert 1 / seconds == pytest.approx(104.9, rel=0.03)
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
