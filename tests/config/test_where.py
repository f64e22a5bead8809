"""Where each stage runs: the default, what a stage says otherwise, and everybody who reads it."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from config.dvc_stages import defined
from config.errors import ParamsError
from config.load import dump, load, validate
from config.records import STAGES
from config.schema import Params
from config.sections.where import SHARED_STAGES, SINGLE_STAGES, Place
from costs.ledger.budget import results_key, same_results
from costs.planning.planner import plan
from costs.planning.rows import count
from costs.planning.settings import setting_of
from costs.planning.target import find_target
from costs.tables.price import pool_of
from tests.conftest import ROOT

DEMO = ROOT / "recipes" / "demo.yaml"


def demo(*assignments: str) -> Params:
    return load(DEMO, list(assignments))


def test_a_stage_that_says_nothing_is_where_the_default_is() -> None:
    params = demo("where.default={pool: gpus, nodes: 2, processes: 4, sharding: zero3, offload: true}")
    for stage in SHARED_STAGES:
        assert params.where.of(stage) == Place(pool="gpus", nodes=2, processes=4, sharding="zero3", offload=True)
    for stage in SINGLE_STAGES:
        assert params.where.of(stage) == Place(pool="gpus", nodes=1, processes=1, sharding="none", offload=False)


@given(
    st.dictionaries(
        st.sampled_from(STAGES),
        st.fixed_dictionaries(
            {},
            optional={
                "pool": st.sampled_from(["local", "a", "b"]),
                "processes": st.sampled_from([1, 2, 4]),
                "sharding": st.sampled_from(["none", "zero2", "zero3"]),
            },
        ),
    )
)
def test_each_key_of_a_stage_overrides_alone_and_the_file_keeps_the_short_form(
    said: dict[str, dict[str, object]],
) -> None:
    for stage in SINGLE_STAGES:
        said.get(stage, {}).pop("processes", None)
        said.get(stage, {}).pop("sharding", None)
    content = demo().model_dump(mode="json")
    default = {"pool": "local", "nodes": 1, "processes": 2, "sharding": "zero2", "offload": False}
    content["where"] = {"default": default, **said}
    params = validate(content, "here")
    for stage in STAGES:
        single = {"processes": 1, "sharding": "none"} if stage in SINGLE_STAGES else {}
        assert params.where.of(stage).model_dump() == default | single | said.get(stage, {})
    written = yaml.safe_load(dump(params))["where"]
    assert written == {"default": default, **{stage: item for stage, item in said.items() if item}}
    assert validate(yaml.safe_load(dump(params)), "again") == params


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("where.evaluate.processes=2", r"where\.evaluate\.processes=2, and stage evaluate is alw"),
        ("where.data.sharding=zero2", r"where\.data\.sharding=zero2, and stage data is always"),
        ("where.data.offload=true", r"where\.data\.offload=true, and stage data is always one"),
        ("where.default.offload=true", r"where\.default\.offload=true moves sharded weights"),
        (
            "where={default: {pool: local, nodes: 1, processes: 2, sharding: zero3, offload: false}, ppo: "
            "{sharding: none, offload: true}}",
            r"where\.ppo\.offload=true moves .* Set where\.ppo\.sharding to zero2",
        ),
        ("where.default.processes=3", r"sft\.batch_size=32 .* where\.default\.processes=3\."),
        ("where.sft.processes=3", r"sft\.batch_size=32 does not split over where\.sft\.proc"),
        ("where.serve.pool=a", r"where\.serve is not a parameter"),
        ("where.ppo.gpus=2", r"where\.ppo\.gpus is not a parameter .* known there: nodes, offload, pool"),
        ("where.sft={nodes: 2, processes: 2}", r"where\.sft\.nodes=2, and where\.default\.pool: local is this"),
        (
            "where.sft={pool: gpus, nodes: 2, processes: 3}",
            r"where\.sft\.processes=3 does not divide over where\.sft\.nodes=2",
        ),
        ("where.default={pool: local}", r"where\.default\.nodes is missing"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_one_line(assignment: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message) as caught:
        demo(assignment)
    assert "\n" not in str(caught.value)


def test_the_plan_takes_processes_sharding_and_offload_of_each_stage(tmp_path: Path) -> None:
    params = demo("where.default.processes=2", "where.ppo={processes: 4, sharding: zero3, offload: true}")
    target = find_target(params, "a100-80", None, None, tmp_path)
    result = {stage.stage: stage.gpus for stage in plan(params, target).stages}
    assert result == {"data": 1, "sft": 2, "reward": 2, "ppo": 4, "evaluate": 1}
    rows, model = (count(params, tmp_path), setting_of(params, target, "sft", count(params, tmp_path), _model(params)))
    assert (model.levers.parallel, model.levers.offload_weights) == ("ddp", False)
    ppo = setting_of(params, target, "ppo", rows, _model(params))
    assert (ppo.levers.parallel, ppo.levers.offload_weights) == ("fsdp", True)


def _model(params: Params):  # type: ignore[no-untyped-def]
    from costs.planning.models import base_shape

    return base_shape(params, Path())


def test_a_pool_has_its_price(tmp_path: Path) -> None:
    params = demo("where.default.pool=gpus", "where.data.pool=local")
    assert (pool_of(params, "ppo"), pool_of(params, "data")) == ("gpus", "local")


def test_where_a_stage_runs_is_in_no_stage_of_dvc_and_in_no_result() -> None:
    for stage, entry in defined(ROOT).items():
        assert not [key for key in entry.get("params", []) if str(key).startswith("where")], stage
    moved = demo("where.default.pool=gpus", "where.ppo.processes=2")
    assert same_results(demo(), moved)
    assert results_key(demo()) == results_key(moved)
