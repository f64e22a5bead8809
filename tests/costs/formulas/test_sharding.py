"""What dividing a model holds and sends: the volumes that ZeRO's authors print, and those that torch's FSDP2 and DDP
had between two processes over gloo.
"""

from dataclasses import replace

import pytest

from benchmarks.published.engines import engine
from costs.formulas.compute import (
    forward_pass,
    gather,
    micro_communication,
    micro_step,
    optimizer_step,
    step_communication,
)
from costs.formulas.memory import Moment
from costs.formulas.setting import Levers, Setting, Workload
from costs.formulas.states import (
    autocast_copies,
    bucket_bytes,
    gathered_bytes,
    gradient_bytes,
    optimizer_bytes,
    resting_weights,
    weights,
)
from costs.formulas.timeline import training_moments
from costs.planning.moments import moments
from costs.planning.phases import phases
from costs.tables.catalogue import hardware
from costs.tables.shapes import ModelShape, from_config
from tests.costs.settings import ppo, sft


def small(tied: bool = False) -> ModelShape:
    """4 layers of 852,480 and two tables of 1,048,576 parameters, 5,507,328 in all."""
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 768,
            "vocab_size": 4096,
            "tie_word_embeddings": tied,
        },
        "small",
    )


N, LAYER, TABLE = 5_507_328, 852_480, 4096 * 256
ROOT = 2 * TABLE + 256


def mixed(parallel: str, gpus: int = 2, software: str = "ours", **levers: object) -> Setting:
    """Full fine-tuning of `small` in bf16 with fp32 weights."""
    held = {"weights_fp32": True, "parallel": parallel, **levers}
    return Setting(
        "sft", small(), Levers(**held), Workload(64, 64, 10),  # type: ignore[arg-type]
        hardware("a100-80"), engine(software), gpus,
    )  # fmt: skip


def sent(setting: Setting) -> float:
    """Bytes that a device sends in an optimizer step."""
    model, levers = setting.model, setting.levers
    micro = micro_communication(setting, model, levers)[0]
    return levers.accumulation * micro + step_communication(setting, model, levers)[0]


@pytest.mark.parametrize(("parallel", "psi"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_the_volume_of_a_step_is_that_of_the_zero_paper(parallel: str, psi: int) -> None:
    # arXiv 1910.02054 section 7: 2 psi up to ZeRO-2, 3 psi for ZeRO-3, of psi 16-bit elements
    setting = sft("llama-7b", gpus=64, software="deepspeed-chat", parallel=parallel)
    assert sent(setting) == pytest.approx(psi * 2 * setting.model.parameters * 63 / 64)


@pytest.mark.parametrize(
    ("parallel", "accumulation", "whole_bytes_a_weight"),
    [
        ("ddp", 1, 2 * 4),  # an all-reduce of fp32 gradients, once a step
        ("ddp", 3, 2 * 4),
        ("zero2", 1, 4 + 4),  # gathered and reduced as stored, in every micro-batch
        ("zero2", 3, 3 * (4 + 4)),
        ("zero3", 1, 2 * 4 + 4),
        ("zero3", 3, 3 * (2 * 4 + 4)),
    ],
)
def test_our_processes_send_what_two_over_gloo_sent(
    parallel: str, accumulation: int, whole_bytes_a_weight: float
) -> None:
    # counted there: all-gathers and reduce-scatters of 4, 8, 12 ... bytes a weight
    setting = mixed(parallel, accumulation=accumulation)
    assert sent(setting) == pytest.approx(whole_bytes_a_weight * N / 2)


def test_frozen_weights_are_gathered_in_16_bit_and_their_adapters_in_fp32() -> None:
    # counted over gloo: gathers of 4.048 bytes a weight, reduces of 0.024, with rank 8 on q and v
    setting = mixed("zero3", tuning="lora", weights_fp32=False)
    adapters = 4 * 2 * 8 * (256 + 256)
    gathered = 2 * (2 * N + 4 * adapters)
    assert gathered / N == pytest.approx(4.048, abs=0.001)
    assert sent(setting) == pytest.approx((gathered + 4 * adapters) / 2)


def test_zero_2_of_ours_holds_all_weights_in_fp32_while_it_works_offloaded_or_not() -> None:
    # two processes held at the loss: 4 N gathered, a layer's buffer, bf16 copies of all matrices
    setting, host = mixed("zero2"), mixed("zero2", offload_weights=True, offload_optimizer=True)
    gathered = 4 * N + 4 * LAYER + 2 * (N - TABLE)
    assert weights(setting, setting.model, setting.levers) == gathered + 4 * N / 2
    assert weights(host, host.model, host.levers) == gathered
    assert resting_weights(setting, setting.model, setting.levers) == 4 * N / 2
    assert resting_weights(host, host.model, host.levers) == 0


def test_seven_billion_weights_on_eight_small_cards_do_not_fit_offloaded() -> None:
    setting = sft(
        "qwen2.5-7b", device="rtx4090", gpus=8, parallel="zero2", weights_fp32=True,
        offload_weights=True, offload_optimizer=True, checkpointing="full",
    )  # fmt: skip
    held = weights(setting, setting.model, setting.levers)
    assert held > 4 * setting.model.parameters > setting.hardware.usable_bytes


def test_zero_3_of_ours_has_two_layers_and_both_tables_whole() -> None:
    setting = mixed("zero3")
    assert weights(setting, setting.model, setting.levers) == (4 * N / 2 + 4 * (ROOT + 2 * LAYER) + 2 * (N - TABLE))
    half = sft("llama-7b", gpus=8, software="torchtune", parallel="fsdp")
    model = half.model
    outside = 2 * model.vocab * model.width + model.width
    assert weights(half, model, half.levers) == pytest.approx(
        2 * (model.parameters / 8 + 2 * model.layer_parameters + outside)
    )


def test_gradients_outside_of_the_layers_are_whole_until_the_backward_pass_ends() -> None:
    setting = mixed("zero3")
    end = training_moments(setting, setting.model, setting.levers)[2].roles["policy"]
    assert end["gradients"] == 4 * N / 2 + 4 * (2 * ROOT + LAYER)


def test_what_two_processes_held_at_the_end_of_the_backward_pass_is_planned() -> None:
    # measured with fp32: 6.00 bytes a weight between two steps, 7.45 more at the fullest moment
    setting = replace(mixed("zero3", dtype="fp32", weights_fp32=False))
    model, levers = setting.model, setting.levers
    between = resting_weights(setting, model, levers) + optimizer_bytes(setting, model, levers)
    assert between / N == 6.0
    moment = max(training_moments(setting, model, levers), key=lambda each: each.total)
    assert moment.phase == "train:backward_end"
    assert (moment.total - between) / N == pytest.approx(7.45, rel=0.05)


def test_divided_gradients_wait_on_the_host_where_the_optimizer_is_offloaded() -> None:
    setting = mixed("zero3", offload_weights=True, offload_optimizer=True)
    assert gradient_bytes(setting, setting.model, setting.levers) == 0
    # up for the forward and for the backward pass, gradients down: 3 shares of 4 bytes a weight
    once = micro_step(setting, setting.model, setting.levers, 1, 64)
    assert once.paged_bytes == 3 * 4 * N / 2
    assert optimizer_step(setting, setting.model, setting.levers).paged_bytes == 0


def test_data_parallel_copies_gradients_into_buckets() -> None:
    first, two = mixed("ddp", gpus=1), mixed("ddp")
    assert bucket_bytes(first, first.model, first.levers) == 0
    held = [training_moments(item, item.model, item.levers)[0].total for item in (first, two)]
    assert held[1] - held[0] == 4 * N


def test_the_loop_sums_gradients_in_messages_of_four_million_numbers() -> None:
    setting = replace(ppo(weights_fp32=True), gpus=2)
    model = setting.model
    assert bucket_bytes(setting, model, setting.levers) == 4 * (2**22 + model.vocab * model.width)
    adapted = replace(ppo(tuning="lora"), gpus=2)
    trained = 16 * 8 * (2048 + 2048 + 2048 + 512)
    assert bucket_bytes(adapted, model, adapted.levers) == 4 * trained


def test_autocast_copies_no_embedding_that_is_only_looked_up() -> None:
    apart = mixed("ddp")
    assert autocast_copies(apart, small(), apart.levers) == 2 * (N - TABLE)
    assert autocast_copies(apart, small(tied=True), apart.levers) == 2 * (N - TABLE)
    assert autocast_copies(mixed("fsdp", software="llm-foundry"), small(), apart.levers) == 0


def test_a_role_is_whole_for_a_phase_and_gathered_once_for_it() -> None:
    setting = replace(ppo(weights_fp32=True, parallel="fsdp"), gpus=8)
    model, levers = setting.model, setting.levers
    held = {moment.phase: moment.roles for moment in moments(setting)}
    frozen = held["score"]["ref"]["weights"]
    assert frozen == 2 * model.parameters / 8
    assert held["reference"]["ref"]["workspace"] >= 2 * model.parameters
    assert gathered_bytes(setting, model, levers) == (4 + 2) * model.parameters
    assert forward_pass(setting, model, levers, 1, 64, 0).communicated_bytes == 0
    assert gather(setting, model, levers).communicated_bytes == 4 * model.parameters * 7 / 8


def test_policy_and_value_model_are_both_at_work_in_an_update() -> None:
    setting = replace(ppo(weights_fp32=True, parallel="fsdp"), gpus=8)
    model, held = setting.model, {moment.phase: moment.roles for moment in moments(setting)}
    at_work = weights(setting, setting.model, setting.levers)
    assert held["update:loss"]["policy"]["weights"] == at_work
    # its backward pass was first, but what is outside of its layers is freed at the end of both
    outside = 4 * (model.vocab * model.width + model.width)
    assert held["update:loss"]["value"]["weights"] == 4 * model.parameters / 8 + outside
    assert held["update:loss"]["value"]["gradients"] == 4 * model.parameters / 8 + outside
    assert held["update:step"]["policy"]["weights"] == 4 * model.parameters / 8
    assert held["rollout"]["value"]["weights"] == 4 * setting.model.parameters / 8


def seconds(setting: Setting, phase: str) -> float:
    return next(item.seconds for item in phases(setting) if item.name == phase)


def test_every_process_evaluates_all_rows_of_sft_and_its_share_of_pairs() -> None:
    for stage, share in (("sft", 1), ("reward", 4)):
        alone, four = (
            replace(sft(gpus=gpus, tokens=256), stage=stage, workload=Workload(256, 256, 10, held_out=64))
            for gpus in (1, 4)
        )
        assert seconds(alone, "evaluate") == pytest.approx(share * seconds(four, "evaluate"))


def test_the_reference_of_dpo_is_shared_and_read_before_the_model_is_divided() -> None:
    work = Workload(256, 256, 10, reference_sequences=64)
    alone, four = (replace(sft(gpus=gpus, parallel="fsdp"), stage="dpo", workload=work) for gpus in (1, 4))
    assert seconds(alone, "reference") == pytest.approx(4 * seconds(four, "reference"))
    whole = {moment.phase: moment for moment in moments(four)}["reference"]
    assert isinstance(whole, Moment)
    assert whole.roles["policy"]["weights"] == 2 * four.model.parameters


def test_a_trainers_8_bit_optimizer_keeps_the_embeddings_moments_in_fp32() -> None:
    setting = replace(mixed("ddp", gpus=1), levers=Levers(optimizer="adamw8bit"))
    narrow = 2 * (1 + 4 / 256)
    assert optimizer_bytes(setting, small(), setting.levers) == (narrow * (N - TABLE) + 8 * TABLE)
    loop = ppo(optimizer="adamw8bit")
    assert optimizer_bytes(loop, loop.model, loop.levers) == narrow * loop.model.parameters


def test_the_first_of_two_processes_gathers_the_model_and_its_bytes_to_write_it() -> None:
    # two processes of DPO over gloo: 23.3 + 46.5 MiB between two steps, and 150 more while saving
    setting = replace(mixed("zero3"), hardware=hardware("cpu"))
    held = {moment.phase: moment.roles["policy"] for moment in moments(setting)}
    assert held["save"] == {"weights": 4 * N / 2, "optimizer": 8 * N / 2, "workspace": 2 * 4 * N}
    for other in (mixed("zero3"), replace(mixed("ddp"), hardware=hardware("cpu"))):
        assert "save" not in {moment.phase for moment in moments(other)}
