"""Everything that lists alignment methods follows from their records in config/methods."""

from typing import get_args

import pytest

from config.dvc_stages import defined, dvc_name
from config.methods.registry import METHODS, OFFLINE_METHODS, RECORDS, SAMPLING_METHODS, stage_module
from config.records import LOOPS, STAGES
from config.schema import Params
from config.sections.online import ActorCritic
from config.sections.run import Align
from config.sections.where import Where
from tests.conftest import ROOT


def test_every_list_of_methods_is_that_of_the_records() -> None:
    assert METHODS == ("ppo", "dpo", "kto", "grpo", "rloo")
    assert OFFLINE_METHODS == ("dpo", "kto")
    assert SAMPLING_METHODS == ("ppo", "grpo", "rloo")
    assert get_args(Align.model_fields["method"].annotation) == METHODS
    assert {*METHODS} < {*Params.model_fields}
    assert {*STAGES} == {*Where.model_fields} - {"default"}
    assert {*METHODS} < {*STAGES}
    assert {*SAMPLING_METHODS} < {*LOOPS}
    assert {*METHODS} < {*defined(ROOT)}
    assert [dvc_name(method) for method in METHODS] == [f"align@{method}" for method in METHODS]


@pytest.mark.parametrize("method", METHODS)
def test_a_record_goes_by_the_name_of_its_file(method: str) -> None:
    record = RECORDS[method]
    assert record.settings.__name__.lower() == method
    assert record.samples == (stage_module(method) == "training.ppo")
    assert record.has_critic == issubclass(record.settings, ActorCritic) == (method == "ppo")
    if record.samples:
        assert record.settings.method == method  # type: ignore[attr-defined]
