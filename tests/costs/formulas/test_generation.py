"""Generation of batches by hand: what is repeated how often, and what is held meanwhile."""

from typing import Any

import pytest

from costs.formulas.compute import decode_step, forward_pass
from costs.formulas.generation import generation, generation_moment
from costs.formulas.memory import frozen_role, generating
from costs.formulas.setting import Setting
from costs.formulas.time import decode_duration, duration
from tests.costs.settings import small_setting

WORK: dict[str, Any] = {"steps": 5, "prompt_tokens": 6, "response_tokens": 4}


def phases(setting: Setting, *batches: float) -> Any:
    return generation(setting, setting.model, setting.levers, *batches)


@pytest.mark.parametrize(("mean", "going"), [(0.0, 8.0), (1.0, 2.0), (4.0, 8.0), (0.25, 1.0)])
def test_each_batch_is_read_once_and_then_decoded_token_by_token(mean: float, going: float) -> None:
    setting = small_setting(WORK | {"mean_response_tokens": mean})
    read = forward_pass(setting, setting.model, setting.levers, 8.0, 6, 8.0)
    # half of the response is in the cache on average
    step = decode_step(setting, setting.model, setting.levers, going, 6 + 2)
    (prefill, decode) = phases(setting, 3.0, 8.0)
    first, item = duration(read, setting), decode_duration(step, setting)
    assert prefill == ("prefill", read.times(3), 3 * first.seconds, first.bound)
    assert decode[0] == "decode"
    assert decode[1] == pytest.approx(step.times(12))
    assert decode[2:] == (pytest.approx(12 * item.seconds), item.bound)


def test_a_stage_generates_its_micro_batches_unless_told_otherwise() -> None:
    setting = small_setting(WORK, micro_batch=3, accumulation=2)
    assert phases(setting) == phases(setting, 10.0, 3.0)
    assert phases(setting, 10.0) == phases(setting, 10.0, 3.0)
    assert phases(setting) != phases(setting, 10.0, 2.0)


def test_without_a_prompt_one_token_is_read_and_without_a_response_none_decoded() -> None:
    setting = small_setting(WORK | {"prompt_tokens": 0, "response_tokens": 0})
    prefill, decode = phases(setting, 1.0, 8.0)
    assert prefill[1] == forward_pass(setting, setting.model, setting.levers, 8.0, 1, 8.0)
    assert decode[2] == 0


@pytest.mark.parametrize(("given", "sequences"), [(None, 3), (7.0, 7)])
def test_memory_is_that_of_weights_and_of_caches_at_full_length(given: float | None, sequences: int) -> None:
    setting = small_setting(WORK, micro_batch=3)
    moment = generation_moment(setting, setting.model, setting.levers, given)
    assert moment.phase == "decode"
    held = generating(setting, setting.model, setting.levers, sequences, 10, 6)
    weights = frozen_role(setting, setting.model, setting.levers)
    assert moment.roles == {"policy": weights | held}
