"""Where the roles of a loop run, and what waits for what."""

from typing import Any

import pytest

from benchmarks.published.loops import Iteration, iteration, side_by_side
from benchmarks.published.measurements import seconds_per_item
from benchmarks.published.row import Measured, Refused, Run, read_row
from benchmarks.published.settings import planned_of
from costs.tables.catalogue import hardware

LOOP: dict[str, Any] = {
    "stage": "ppo", "device": "a100-80", "gpus": 8, "prompt_tokens": 512, "response_tokens": 512,
    "rollout_batch": 256, "mini_batch": 64, "value_model": "llama-7b", "reward_model": "llama-7b",
    "dtype": "bf16", "tuning": "full", "sharding": "zero3", "model": "llama-7b",
    "generation_batch": 8, "micro_batch": 4, "engine": "openrlhf",
}  # fmt: skip
APART = {"ref": 1, "reward": 1, "policy": 4, "value": 2}
SERVED_APART = {"ref": 1, "reward": 1, "policy": 2, "value": 2, "engine": 2}
TOKENS = Measured(quantity="throughput", unit="1/s", per="token")


def run(base: dict[str, Any], **changes: Any) -> Run:
    row = {"id": "r", "source": "s", "run": base | changes, "measured": [{"quantity": "fits"}]}
    return read_row(row).run


def parts(**changes: Any) -> Iteration:
    return iteration(planned_of(run(LOOP, **changes)))


def test_a_server_generates_faster_than_a_divided_model_that_gathers_for_every_token() -> None:
    gathered, served = parts(roles=APART), parts(roles=SERVED_APART)
    assert served.generation < gathered.generation
    # the weights go to the server, and nowhere else
    assert served.transfer > 0
    assert gathered.transfer == 0


def test_weights_cross_the_network_where_the_devices_are_of_several_nodes() -> None:
    near = parts(roles=SERVED_APART)
    far = parts(roles={role: 2 * count for role, count in SERVED_APART.items()}, gpus=16)
    device = hardware("a100-80")
    slower = device.link_bytes_per_second / device.network_bytes_per_second
    assert slower > 5
    assert far.transfer == pytest.approx(slower * near.transfer)


def test_old_log_probs_are_a_pass_of_the_policy() -> None:
    roles = {"ref": 4, "reward": 4, "policy": 2, "value": 4}
    few, more = parts(roles=roles, gpus=14), parts(roles=roles | {"policy": 1}, gpus=13)
    assert more.scoring == pytest.approx(2 * few.scoring, rel=0.05)


def test_responses_that_end_early_cost_less_than_the_longest() -> None:
    long, short = parts(), parts(mean_response_tokens=256.0, packed=True)
    padded = parts(mean_response_tokens=256.0)
    # of four rows the longest is twice as long as the mean, so that nothing is spared
    assert padded.training == pytest.approx(long.training)
    assert short.training < 0.8 * long.training
    assert short.scoring < 0.8 * long.scoring
    # the steps of a batch go on to its longest response
    assert short.generation > 0.9 * long.generation


SERVED: dict[str, Any] = {
    "stage": "generate", "engine": "lmdeploy", "model": "llama-7b", "device": "a100-80", "gpus": 1,
    "micro_batch": 64, "prompt_tokens": 2048, "response_tokens": 2048, "dtype": "fp16",
}  # fmt: skip


def test_a_server_has_as_many_sequences_at_work_as_its_cache_holds() -> None:
    setting = planned_of(run(SERVED)).setting
    token = 2 * 32 * 4096 * 2  # keys and values of 32 layers in 16 bit
    room = 0.9 * hardware("a100-80").usable_bytes - 2 * 6_738_415_616
    side = room / (token * (2048 + 1024))
    assert 30 < side < 64
    assert side_by_side(setting, 64.0) == pytest.approx(side)
    assert side_by_side(setting, 8.0) == 8.0
    # half the bytes of a key, room for twice as many
    packed = setting.with_levers(cache_dtype="fp8")
    assert side_by_side(packed, 1000.0) == pytest.approx(2 * side)
    plain = planned_of(run(SERVED, engine="transformers")).setting
    assert side_by_side(plain, 64.0) == 64.0


def test_sequences_that_wait_take_their_time() -> None:
    few, many = (planned_of(run(SERVED, micro_batch=each)) for each in (32, 128))
    rates = [1 / seconds_per_item(each, TOKENS) for each in (few, many)]
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_a_server_in_a_loop_takes_what_its_cache_has_room_for_not_a_training_pass() -> None:
    changes = {"roles": SERVED_APART, "generation_batch": None, "micro_batch": 1}
    base = {key: value for key, value in (LOOP | changes).items() if value is not None}
    apart = [planned_of(run(base, micro_batch=micro)) for micro in (1, 2)]
    times = [iteration(each).generation for each in apart]
    assert times[0] == times[1]
    assert times[0] < 0.5 * parts(roles=SERVED_APART).generation


def test_a_hybrid_engine_generates_with_whole_weights() -> None:
    hybrid = parts(engine="deepspeed-chat")
    plain = parts(engine="deepspeed-chat", generator="training")
    assert hybrid.generation < 0.7 * plain.generation


def test_roles_apart_train_side_by_side() -> None:
    few, more = parts(roles=APART), parts(roles=APART | {"policy": 6}, gpus=10)
    # the value model on its two devices decides, however many the policy has
    assert more.training == few.training
    assert more.generation < few.generation


def test_one_step_apart_the_longer_half_decides() -> None:
    same, apart = parts(roles=SERVED_APART), parts(roles=SERVED_APART, lag=1)
    rest = same.seconds - same.generation - same.fixed
    assert apart.seconds == pytest.approx(max(same.generation, rest) + same.fixed)


def test_roles_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(Refused, match="does not add up to gpus=8"):
        parts(roles=APART | {"policy": 2})
