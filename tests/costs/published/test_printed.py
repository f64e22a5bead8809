"""Every key and word of a published setting is used or refused by name; nothing is guessed from it
in silence.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs.published.keys import CANONICAL
from costs.published.printed import read
from costs.published.settings import planned_of, setting_of
from costs.published.table import estimates
from costs.published.words import Refused

BASE: dict[str, Any] = {
    "stage": "sft",
    "engine": "litgpt",
    "model": "Llama 2 7B",
    "gpu": "A100-SXM4-40GB",
    "gpus": 1,
    "micro_batch": 1,
    "seq_len": 2048,
    "tuning": "full",
    "dtype": "bf16",
}


def with_(**changes: Any) -> dict[str, Any]:
    """BASE with other keys; None takes a key out."""
    return {key: value for key, value in (BASE | changes).items() if value is not None}


def words(**changes: Any) -> str:
    with pytest.raises(Refused) as refused:
        setting_of(with_(**changes))
    return str(refused.value)


def test_printed_words_become_levers() -> None:
    levers = setting_of(
        with_(tuning="lora r8 q,v", quant="bnb.nf4-dq", dtype="bf16-true", global_batch=128)
    ).levers
    assert levers.tuning == "lora"
    assert (levers.lora_rank, levers.lora_modules) == (8, ("q", "v"))
    assert (levers.quantisation, levers.accumulation) == ("nf4-dq", 128)


def test_zero_3_divides_the_weights() -> None:
    levers = setting_of(with_(zero=3, gpus=8, engine="transformers")).levers
    assert levers.parallel == "zero3"
    assert setting_of(with_(zero="ZeRO-2", gpus=8, engine="HF Trainer")).levers.parallel == "zero2"


@pytest.mark.parametrize("printed", ["8K", "8k tokens", 8192, "8,192", "8192 tokens", ["8192"]])
def test_lengths_have_units(printed: Any) -> None:
    assert setting_of(with_(seq_len=printed)).workload.max_tokens == 8192


def test_a_list_of_modules_is_read() -> None:
    levers = setting_of(with_(tuning="lora", lora_modules=["query", "value"])).levers
    assert levers.lora_modules == ("q", "v")
    assert setting_of(with_(tuning="lora", target_modules="all-linear")).levers.lora_modules == (
        "q", "k", "v", "o", "gate", "up", "down",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("H100-80GB-HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("V100-32GB (inferred)", "v100-32"),
        ("8x H100 80GB", "h100-sxm"),
        ("A10G-24GB", "a10g"),
    ],
)
def test_devices_have_many_names(device: str, name: str) -> None:
    printed = read(with_(gpu=device, dtype="fp16"))
    assert printed.device is not None
    assert printed.device.name == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2-72B-Instruct", "qwen2-72b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("OPT-350M reward model", "opt-350m"),
        ("qwen-1_8b-chat", "qwen1-1.8b"),
    ],
)
def test_models_have_many_names(model: str, name: str) -> None:
    assert read(with_(model=model)).model.name == name


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"frobnicate": 3}, "frobnicate"),
        ({"engine": "flurbtrain 2.0"}, "flurbtrain"),
        ({"gpu": "Z9000"}, "z9000"),
        ({"gpu": "H100-64GB"}, "h100-64gb"),
        ({"model": "Wumpus-9B"}, "Wumpus-9B"),
        ({"dtype": "posit16"}, "posit16"),
        ({"seq_len": "8 furlongs"}, "8 furlongs"),
        ({"tuning": "lora with glitter"}, "glitter"),
        ({"tuning": "dora"}, "dora"),
        ({"optimizer": "muon"}, "muon"),
        ({"zero": 7}, "7"),
        ({"dtype": "fp8"}, "fp8"),
        ({"stage": "knitting"}, "knitting"),
        ({"grad_checkpointing": "sometimes"}, "sometimes"),
        ({"gpus": "many"}, "many"),
        ({"gpus": float("nan")}, "nan"),
        ({"micro_batch": -1}, "-1"),
        ({"micro_batch": {"a": 1}}, "micro_batch"),
        ({"quant": "gguf q4_k_m"}, "gguf"),
        ({"gpu": "A100-80GB (moonlit)"}, "moonlit"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    assert word in words(**changes)


def test_a_refusal_names_the_nearest_known_words() -> None:
    assert "(nearest known: seq_len," in words(seq_lenn=2048)
    assert "h100" in words(gpu="H1000")
    assert "torchtune" in words(engine="torchtun")


def test_every_unread_word_is_refused_at_once() -> None:
    said = words(frobnicate=3, engine="flurbtrain", gpu="Z9000")
    assert all(word in said for word in ("frobnicate", "flurbtrain", "z9000"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"micro_batch": None}, "batch"),
        ({"seq_len": None}, "seq_len"),
        ({"model": None}, "model"),
        ({"tuning": None, "stage": "sft"}, "tuning"),
        ({"stage": "pretrain", "gpus": None}, "gpus"),
        ({"stage": "inference", "tuning": None, "batch_size": 64, "micro_batch": None,
          "seq_len": None}, "prompt_len"),
        ({"stage": "ppo", "seq_len": None}, "gen_len"),
    ],
)  # fmt: skip
def test_what_decides_and_is_missing_is_asked_for(changes: dict[str, Any], word: str) -> None:
    assert word in words(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 8},
        {"tuning": "lora", "details": "full fine-tune"},
        {"global_batch": 7, "gpus": 2, "grad_accum": 4},
        {"gpus": 8, "nodes": 2, "gpus_per_node": 8},
        {"params": 13_000_000_000},
        {"quant": "nf4"},
        {"tensor_parallel": 3, "gpus": 8},
        {"micro_batch": 1, "per_device_train_batch_size": 2},
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any]) -> None:
    assert words(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_parallel": 8},
        {"parallelism": "EP4"},
        {"stage": "inference", "pipeline_parallel": 2, "gpus": 2, "tuning": None},
        {"gpus_per_engine": 4},
        {"details": "single GPU", "gpus": 2},
        {"trainable_params": "8M"},
    ],
)
def test_what_has_no_formula_is_refused_not_dropped(changes: dict[str, Any]) -> None:
    assert words(**changes)


def test_a_batch_beside_a_micro_batch_is_of_all_devices() -> None:
    levers = setting_of(with_(gpus=8, micro_batch=2, train_batch_size=64)).levers
    assert (levers.micro_batch, levers.accumulation) == (2, 4)
    levers = setting_of(with_(micro_batch=None, train_batch_size=4)).levers
    assert (levers.micro_batch, levers.accumulation) == (4, 1)


def test_a_pair_is_two_sequences() -> None:
    assert setting_of(with_(stage="dpo", micro_batch=2)).levers.micro_batch == 4
    both = with_(stage="dpo", micro_batch=None, sequences_per_gpu=4, pairs_per_gpu=2)
    assert setting_of(both).levers.micro_batch == 4


def test_an_engine_may_name_its_date_its_flags_and_its_tuning() -> None:
    found = setting_of(with_(engine="PEFT (LoRA) with DeepSpeed ZeRO-3 CPU offload", tuning=None,
                             gpus=4))  # fmt: skip
    assert found.levers.tuning == "lora"
    assert found.levers.parallel == "zero3"
    assert found.levers.offload_optimizer
    assert setting_of(with_(engine="torchtune 0.2 (Jul 2024)")).engine.name == "torchtune-2024"


def test_fp8_is_faster_where_the_device_has_it() -> None:
    row = {
        "setting": with_(gpu="H100-80GB", engine="NeMo/Megatron", global_batch=8, gpus=8),
        "measured": {"unit": "s per step", "value": 1.0},
    }
    plain = estimates([row])[0]["planned"]
    row["setting"]["dtype"] = "fp8"
    assert estimates([row])[0]["planned"] < 0.8 * plain


def test_the_cache_of_a_served_batch_counts_prompt_and_response() -> None:
    row = {
        "setting": {
            "stage": "inference", "engine": "vLLM", "model": "Llama-3.1-8B", "gpu": "H100-80GB",
            "batch_size": 64, "input_len": 4096, "output_len": 1024, "dtype": "bf16",
        },
        "measured": {"unit": "GiB", "value": None},
    }  # fmt: skip
    # 16.1 GB of weights, 64 x 5,120 tokens of 128 KiB
    least = (8.03e9 * 2 + 64 * 5120 * 2 * 32 * 1024 * 2) / 2**30
    assert least <= estimates([row])[0]["planned"] <= 1.1 * least


def test_neither_id_nor_title_matters() -> None:
    row = {"setting": dict(BASE), "measured": {"unit": "GiB peak", "value": 30.0}}
    named = row | {"id": "llama1_a6000_dschat", "source": {"title": "torchtune @ca0a6de40 2024"}}
    first, second = estimates([row])[0], estimates([named])[0]
    assert first["planned"] == second["planned"]
    assert (first["low"], first["high"]) == (second["low"], second["high"])


def test_a_date_that_is_none_is_refused_and_versions_that_say_nothing_are_named() -> None:
    assert "wibble" in words(date="wibble")
    row = {"setting": with_(versions="wibble 3"), "measured": {"unit": "GiB", "value": 1.0}}
    assert any("versions" in note for note in estimates([row])[0]["without_effect"])


def test_what_is_filled_in_is_said() -> None:
    assumed = planned_of(with_(engine=None, dtype=None)).assumptions
    assert any("engine" in note for note in assumed)
    assert any("dtype" in note for note in assumed)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**6),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["8K", "full", "lora", "none", "TP4 PP2", "fp8", "int4", "same", "3:1:2"]),
    st.lists(st.sampled_from(["q", "v", 1, None]), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.dictionaries(st.sampled_from(sorted(CANONICAL)), VALUES, max_size=4), VALUES)
@settings(max_examples=400, deadline=None)
def test_no_row_ends_in_a_traceback(changes: dict[str, Any], value: Any) -> None:
    row = {"id": 1, "setting": BASE | changes, "measured": {"unit": "GiB", "value": value}}
    for found in estimates([row]):
        assert "planned" in found or found["refused"]
        assert "formulas can not plan" not in str(found.get("refused"))


@pytest.mark.parametrize("row", [None, 3, "x", [], {}, {"setting": 3}, {"setting": {}},
                                 {"setting": BASE}, {"setting": BASE, "measured": 3}])  # fmt: skip
def test_rows_that_are_none_are_refused(row: Any) -> None:
    assert estimates([row])[0]["refused"]
