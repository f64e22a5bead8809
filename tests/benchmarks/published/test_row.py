"""A typed row is read whole or refused, one line for each mistake."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.row import Refused, Run, read_row
from benchmarks.published.settings import planned_of
from benchmarks.published.table import ROWS, estimates, published, read_table

RUN: dict[str, Any] = {
    "stage": "sft", "engine": "litgpt", "model": "llama-7b", "device": "a100-80", "gpus": 8,
    "micro_batch": 1, "max_tokens": 2048, "tuning": "full", "dtype": "bf16",
}  # fmt: skip
MEASURED = {"quantity": "memory", "value": 40.0, "unit": "GiB"}


def row(measured: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A row whose run has other keys; None takes a key out."""
    run = {key: value for key, value in (RUN | changes).items() if value is not None}
    return {"id": "r", "source": "s", "run": run, "measured": [MEASURED | (measured or {})]}


MISTAKES = [
    (row(enigne="litgpt"), "run.enigne is not a key", "nearest: engine"),
    (row(engine="litgtp"), "run.engine='litgtp'", "mean litgpt"),
    (row(device="a100-81"), "run.device='a100-81'", "a100-80"),
    (row(model="lama-7b"), "run.model='lama-7b'", "llama-7b"),
    (row(stage="sfd"), "run.stage='sfd' is not one of", "nearest: sft"),
    (row(dtype="bfloat16"), "run.dtype='bfloat16' is not one of", "nearest: bf16"),
    (row(sharding="zero-3"), "run.sharding='zero-3'", "nearest: zero3"),
    (row(recomputation=True), "run.recomputation=True is not one of", "full"),
    (row(micro_batch=0), "run.micro_batch=0", "greater than or equal to 1"),
    (row(micro_batch="8"), "run.micro_batch='8'", "valid integer"),
    (row(gpus=6, tensor_parallel=4), "gpus=6 does not split", "tensor_parallel"),
    (row(gpus=3, tensor_parallel=3), "tensor_parallel=3", "32 attention heads"),
    (row(lora_rank=8), "lora_rank=8 contradicts tuning=full", "Leave one out"),
    (row(quantisation="nf4"), "quantisation=nf4 contradicts", "frozen"),
    (row(max_tokens=None), "needs max_tokens", "memory and time"),
    (row(mean_tokens=4096.0), "mean_tokens=4096", "max_tokens=2048"),
    (row(tuning="lora", stage="ppo"), "needs prompt_tokens and response_tokens", "ppo"),
    (row(global_batch=100.0, accumulation=4), "global_batch=100", "micro_batch=1 x accumulation=4"),
    (row({"unit": "GIB"}), "unit='GIB' of quantity=memory is not one of", "nearest: GiB"),
    (row({"value": -1.0}), "value=-1.0", "a number above 0"),
    (row({"quantity": "speed"}), "quantity='speed' is not one of", "memory"),
    (row({"quantity": "throughput", "unit": "TFLOP/s"}), "per='step' does not go", "TFLOP/s"),
    ({"id": "r", "run": RUN, "measured": [MEASURED]}, "source is missing", ""),
    ("a row", "a row is a mapping", "run"),
]


@pytest.mark.parametrize(("content", "key", "rule"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key_and_the_rule(content: Any, key: str, rule: str) -> None:
    (result,) = estimates([content])
    (line,) = result["refused"]
    assert key in line
    assert rule in line
    assert "\n" not in line


def test_several_mistakes_are_named_together() -> None:
    with pytest.raises(Refused) as refused:
        read_row(row(enigne="x", dtype="half"))
    assert "run.enigne" in str(refused.value)
    assert "run.dtype" in str(refused.value)


def test_a_file_gives_its_rows_its_source_and_what_their_runs_have_in_common(tmp_path: Any) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("source: A page\nrun: {stage: sft, gpus: 8}\nrows:\n- {id: a, run: {gpus: 4}}\n")
    (result,) = read_table(file)
    assert result == {"source": "A page", "id": "a", "run": {"stage": "sft", "gpus": 4}}


def test_every_row_in_the_repository_is_planned() -> None:
    rows = published()
    assert len({row.id for row in rows}) == len(rows) > 340
    assert all(planned_of(row.run).setting.model for row in rows)


def test_what_a_row_leaves_out_is_assumed_and_listed() -> None:
    result = planned_of(read_row(row(dtype=None, engine=None, device=None)).run)
    assert [note.partition(":")[0] for note in result.assumptions] == [
        "device is not stated",
        "engine is not stated",
        "recomputation is not stated",
        "dtype is not stated",
        "optimizer is not stated",
    ]


@pytest.mark.parametrize(
    ("changes", "fp32", "master"),
    [
        ({}, False, False),
        ({"trained_weights": "fp32"}, True, False),
        ({"engine": "torchtitan"}, True, False),
        ({"engine": "megatron"}, False, True),
        ({"sharding": "zero3"}, False, True),
        ({"sharding": "zero3", "trained_weights": "fp32"}, False, True),
        ({"sharding": "ddp", "dtype": "fp16"}, False, True),
        ({"tuning": "lora", "trained_weights": "fp32"}, True, False),
    ],
)
def test_weights_beside_the_compute_type(changes: Any, fp32: bool, master: bool) -> None:
    levers = planned_of(read_row(row(**changes)).run).setting.levers
    assert (levers.weights_fp32, levers.master_fp32) == (fp32, master)


@pytest.mark.parametrize(
    ("engine", "sharding"),
    [("pytorch-fsdp", "fsdp"), ("automodel", "fsdp"), ("transformers", "ddp"), ("megatron", "zero1")],
)
def test_an_engine_shards_as_it_does_by_itself(engine: str, sharding: str) -> None:
    assert planned_of(read_row(row(engine=engine)).run).setting.levers.parallel == sharding
    alone = planned_of(read_row(row(engine=engine, gpus=1)).run).setting.levers
    assert alone.parallel == "ddp"


ODD = [None, 0, 1, 3, 1000, 10**7, 1.5, -1, True, "bf16", "full", "none", [], ["q"], {}, "x",
       float("nan"), float("inf")]  # fmt: skip


@given(data=st.data())
def test_no_row_ends_in_a_traceback(data: st.DataObject) -> None:
    row_ = data.draw(st.sampled_from(every_row()))
    result = row_ | {"run": dict(row_["run"])}
    for key in data.draw(st.lists(st.sampled_from(sorted(Run.model_fields)), max_size=3)):
        result["run"][key] = data.draw(st.sampled_from(ODD))
    (first, *_) = estimates([result])
    assert ("refused" in first) != ("planned" in first)


@cache
def every_row() -> list[dict[str, Any]]:
    return [row for file in sorted(ROWS.glob("*.yaml")) for row in read_table(file)]
