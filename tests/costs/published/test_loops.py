"""Where the roles of a loop run, and what waits for what."""

from typing import Any

import pytest

from costs.published.loops import devices_of, iteration, side_by_side
from costs.published.measurements import seconds_per_item
from costs.published.settings import planned_of
from costs.published.units import unit_of
from costs.published.words import Refused
from costs.tables.catalogue import hardware

LOOP: dict[str, Any] = {
    "stage": "ppo", "gpu": "A100-80GB", "gpus": 8, "prompt_len": 512, "gen_len": 512,
    "rollout_batch": 256, "train_batch": 64, "critic": "same size as actor",
    "reward": "same size as actor", "dtype": "bf16", "tuning": "full", "zero": 3,
    "actor": "Llama2-7B", "gen_micro_batch": 8, "train_micro_batch": 4,
}  # fmt: skip


def parts(**changes: Any) -> Any:
    return iteration(planned_of(LOOP | changes))


def test_a_server_generates_faster_than_a_divided_model_that_gathers_for_every_token() -> None:
    gathered = parts(engine="OpenRLHF Ray 1:1:4:2")
    served = parts(engine="OpenRLHF Ray+vLLM 1:1:2:2:2")
    assert served.generation < gathered.generation
    # the weights go to the server, and nowhere else
    assert served.transfer > 0
    assert gathered.transfer == 0


def test_weights_cross_the_network_where_the_devices_are_of_several_nodes() -> None:
    near = parts(engine="OpenRLHF Ray+vLLM 1:1:2:2:2")
    far = parts(engine="OpenRLHF Ray+vLLM 2:2:4:4:4", gpus=16)
    device = hardware("a100-80")
    slower = device.link_bytes_per_second / device.network_bytes_per_second
    assert slower > 5
    assert far.transfer == pytest.approx(slower * near.transfer)


SERVED: dict[str, Any] = {
    "stage": "inference", "engine": "lmdeploy", "model": "llama2-7b", "gpu": "A100-80GB",
    "gpus": 1, "batch_size": 64, "input_len": 2048, "output_len": 2048, "dtype": "fp16",
}  # fmt: skip


def test_a_server_has_as_many_sequences_at_work_as_its_cache_holds() -> None:
    setting = planned_of(SERVED).setting
    token = 2 * 32 * 4096 * 2  # keys and values of 32 layers in 16 bit
    room = 0.9 * hardware("a100-80").usable_bytes - 2 * 6_738_415_616
    side = room / (token * (2048 + 1024))
    assert 30 < side < 64
    assert side_by_side(setting, 64.0) == pytest.approx(side)
    assert side_by_side(setting, 8.0) == 8.0
    # half the bytes of a key, room for twice as many
    packed = setting.with_levers(cache_dtype="fp8")
    assert side_by_side(packed, 1000.0) == pytest.approx(2 * side)
    plain = planned_of(SERVED | {"engine": "HF transformers"}).setting
    assert side_by_side(plain, 64.0) == 64.0


def test_sequences_that_wait_take_their_time() -> None:
    unit = unit_of("output tokens/s")
    few, many = (planned_of(SERVED | {"batch_size": each}) for each in (32, 128))
    rates = [1 / seconds_per_item(each, unit) for each in (few, many)]
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_a_hybrid_engine_generates_with_whole_weights() -> None:
    hybrid = parts(engine="DeepSpeed-Chat")
    plain = parts(engine="DeepSpeed-Chat w/o offload, no HE")
    assert hybrid.generation < 0.7 * plain.generation


def test_roles_apart_are_named_or_in_the_usual_order() -> None:
    named = planned_of(LOOP | {"engine": "OpenRLHF Ray ref:reward:actor:critic 1:1:4:2"})
    assert devices_of(named) == {"ref": 1, "reward": 1, "actor": 4, "critic": 2}
    plain = planned_of(LOOP | {"engine": "OpenRLHF Ray 1:1:4:2"})
    assert devices_of(plain) == devices_of(named)


def test_roles_apart_train_side_by_side() -> None:
    few = parts(engine="OpenRLHF Ray 1:1:4:2")
    more = parts(engine="OpenRLHF Ray 1:1:6:2", gpus=10)
    # the critic on its two devices decides, however many the policy has
    assert more.training == few.training
    assert more.generation < few.generation


def test_one_step_apart_the_longer_half_decides() -> None:
    same = parts(engine="OpenRLHF Ray+vLLM 1:1:2:2:2")
    apart = parts(engine="OpenRLHF Ray+vLLM 1:1:2:2:2, one-step off")
    assert apart.seconds == pytest.approx(
        max(same.generation, same.seconds - same.generation), rel=1e-9
    )


def test_a_placement_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(Refused, match="1:1:2:2"):
        parts(engine="OpenRLHF Ray 1:1:2:2")
    with pytest.raises(Refused, match="how many each"):
        parts(engine="OpenRLHF Ray")
