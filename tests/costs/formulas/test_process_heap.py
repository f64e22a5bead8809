from dataclasses import replace

import pytest

from costs.formulas.activations import layer_kept
from costs.formulas.memory import Moment
from costs.formulas.process_heap import (
    HEAP_WASTE,
    IMPORTS_BYTES,
    RUNTIME_BYTES,
    TRAINER_IMPORTS_BYTES,
    TRAINER_RUNTIME_BYTES,
    activations_in_heap,
    gradients_in_heap,
    heap_bytes,
    imports_bytes,
    pass_tokens,
    with_process,
)
from costs.formulas.setting import Setting
from costs.tables.shapes import from_config
from tests.costs.settings import ppo, sft, small_mixture

MIB = 2**20


def tiny(tokens: int = 64, width: int = 128, vocab: int = 512, **levers: object) -> Setting:
    """A two-layer Llama in fp32 on a CPU, whose widest activation of `tokens` tokens has 16 * width
    * tokens bytes.
    """
    fields = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 4 * width,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    setting = sft(device="cpu", dtype="fp32", tokens=tokens, **levers)
    return replace(setting, model=from_config(fields, "tiny"))


def test_the_heap_holds_small_activations_and_maps_large_ones() -> None:
    assert activations_in_heap(tiny(tokens=64)) == 1
    assert activations_in_heap(tiny(tokens=8192)) == 0
    # 2 MiB of the feed-forward part are mapped, 0.5 MiB of all else are not
    some = activations_in_heap(tiny(tokens=1024))
    assert 0.3 < some < 0.7


def test_scores_of_eager_attention_are_mapped_by_their_own_size() -> None:
    assert activations_in_heap(tiny(tokens=600, attention="eager")) < activations_in_heap(tiny(tokens=600)) == 1


def test_gradients_of_a_large_vocabulary_are_mapped() -> None:
    assert gradients_in_heap(tiny()) == 1
    large = tiny(vocab=32000)
    assert gradients_in_heap(large) == pytest.approx(1 - 32000 * 128 / large.model.parameters)
    assert gradients_in_heap(tiny(vocab=32000, tuning="lora")) == 1


MOMENTS = [
    Moment("rollout", {"policy": {"weights": 7e6, "activations": 1e6}}),
    Moment(
        "update:loss", {"policy": {"weights": 7e6, "activations": 4e6}, "value": {"activations": 1e6, "logits": 9e6}}
    ),
    Moment("update:step", {"policy": {"weights": 7e6, "gradients": 3e6}}),
]


def test_the_heap_is_as_large_as_at_the_fullest_moment_of_a_phase() -> None:
    held = heap_bytes({"activations": 0.5, "gradients": 1.0}, MOMENTS)
    assert held == pytest.approx({"rollout": (1 + HEAP_WASTE) * 0.5e6, "update": (1 + HEAP_WASTE) * 3e6})


def test_the_process_is_a_role_that_keeps_what_the_heap_keeps() -> None:
    rollout, loss, step = with_process(tiny(), MOMENTS)
    fixed = TRAINER_IMPORTS_BYTES + TRAINER_RUNTIME_BYTES
    assert rollout.total == pytest.approx(7e6 + fixed + (1 + HEAP_WASTE) * 1e6)
    assert loss.total == pytest.approx(7e6 + 9e6 + fixed + (1 + HEAP_WASTE) * 5e6)
    # what the loss had there is free, but not given back
    assert step.total == pytest.approx(7e6 + fixed + (1 + HEAP_WASTE) * 5e6)


def test_packed_rows_leave_out_the_last_token_of_each_sequence() -> None:
    assert pass_tokens(ppo(device="cpu")) == 4 * 511
    assert pass_tokens(ppo(device="cpu", stage="rloo")) == 4 * 511
    assert pass_tokens(tiny(tokens=64)) == 64


@pytest.mark.parametrize("stage", ["sft", "pretrain", "reward", "dpo"])
def test_stages_on_trainers_import_more(stage: str) -> None:
    setting = replace(tiny(), stage=stage)
    held = with_process(setting, MOMENTS)[0].roles["process"]["workspace"]
    beyond = (1 + HEAP_WASTE) * 1e6 - 1e6
    assert imports_bytes(setting) == TRAINER_IMPORTS_BYTES
    assert held == pytest.approx(TRAINER_IMPORTS_BYTES + TRAINER_RUNTIME_BYTES + beyond)
    evaluation = replace(setting, stage="evaluate")
    held = with_process(evaluation, MOMENTS)[0].roles["process"]["workspace"]
    assert imports_bytes(evaluation) == IMPORTS_BYTES
    assert held == pytest.approx(IMPORTS_BYTES + RUNTIME_BYTES + beyond)


def kept_share(setting: Setting, mapped: set[str]) -> float:
    """Share of a layer's kept bytes in parts that are not `mapped`."""
    kept = layer_kept(setting.model, setting.levers, setting.engine, setting.workload.max_tokens, setting.mask_tensor)
    assert mapped <= set(kept)
    return sum(size for part, size in kept.items() if part not in mapped) / sum(kept.values())


@pytest.mark.parametrize(
    ("tokens", "mapped"),
    [
        # a feed-forward tensor has 2 KiB a token, all others 512 bytes
        (1023, set()),
        (1024, {"feed_forward"}),
        (4095, {"feed_forward"}),
        (4096, {"feed_forward", "norms", "projections", "attention"}),
    ],
)
def test_tensors_of_two_mebibytes_are_mapped_and_smaller_ones_are_not(tokens: int, mapped: set[str]) -> None:
    setting = tiny(tokens=tokens)
    assert activations_in_heap(setting) == pytest.approx(kept_share(setting, mapped))


def test_tensors_are_of_the_compute_type_and_norms_of_fp32() -> None:
    setting = tiny(tokens=4096)
    halved = replace(setting, levers=replace(setting.levers, dtype="bf16"))
    assert activations_in_heap(halved) == pytest.approx(kept_share(halved, {"feed_forward", "norms"}))


def test_scores_and_masks_have_a_row_for_every_token() -> None:
    # 2 heads x 512 tokens x 4 bytes x 512 tokens
    for tokens, mapped in ((511, set()), (512, {"attention"})):
        setting = tiny(tokens=tokens, attention="eager")
        assert activations_in_heap(setting) == pytest.approx(kept_share(setting, mapped))
    for tokens, mapped in ((500, set()), (600, {"mask", "feed_forward"})):
        setting = tiny(tokens=tokens, micro_batch=2)
        padded = replace(setting, workload=replace(setting.workload, masked=True, mean_tokens=10.0))
        assert activations_in_heap(padded) == pytest.approx(kept_share(padded, mapped))


def test_an_experts_tensors_are_as_wide_as_the_expert() -> None:
    setting = replace(tiny(tokens=4096), model=small_mixture())
    wide = replace(setting.model, mlp_width=10_000)
    assert activations_in_heap(replace(setting, model=wide)) == activations_in_heap(setting) == 1


@pytest.mark.parametrize(("tokens", "share"), [(4095, 1.0), (4096, 0.0)])
def test_recomputed_layers_keep_inputs_alone(tokens: int, share: float) -> None:
    assert activations_in_heap(tiny(tokens=tokens, checkpointing="full")) == share


def test_a_table_or_matrix_of_two_mebibytes_is_mapped() -> None:
    for vocab, mapped in ((4095, 0), (4096, 4096 * 128)):
        setting = tiny(vocab=vocab)
        assert gradients_in_heap(setting) == pytest.approx(1 - mapped / setting.model.parameters)
    untied = tiny(vocab=4096)
    untied = replace(untied, model=replace(untied.model, tied=False))
    assert gradients_in_heap(untied) == pytest.approx(1 - 2 * 4096 * 128 / untied.model.parameters)
    # at width 512, q and o have 1 MiB; gate, up and down have 4 MiB each
    wide = tiny(width=512)
    assert gradients_in_heap(wide) == pytest.approx(1 - 2 * 3 * 512 * 2048 / wide.model.parameters)
    exact = replace(wide, model=replace(wide.model, mlp_width=1024))
    assert gradients_in_heap(exact) == pytest.approx(1 - 2 * 3 * 512 * 1024 / exact.model.parameters)
    halves = replace(exact, levers=replace(exact.levers, dtype="bf16"))
    assert gradients_in_heap(halves) == 1
