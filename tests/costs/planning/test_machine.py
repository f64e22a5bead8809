"""The calibrated machine as a device of the planner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.errors import CostError
from config.load import load
from config.workspace.machine import MACHINE_FILE, Machine, Product, Stream, bf16_instructions
from costs.formulas.calibrated import (
    adapter_gradient_seconds,
    calibrated_pass,
    fold_seconds,
    table_seconds,
)
from costs.formulas.ppo import ppo_phases
from costs.formulas.setting import Rlhf, Setting, Workload
from costs.planning.machine import FP32, OURS, _shape, device, rates, this_machine, unmeasured
from costs.planning.planner import plan
from costs.planning.target import target
from costs.tables.catalogue import Hardware, hardware
from costs.tables.shapes import ModelShape, from_config
from tests.costs.machines import machine

DEMO = Path("recipes/demo.yaml")


def written(root: Path) -> Path:
    path = root / MACHINE_FILE
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(machine().model_dump(mode="json")))
    return path


def at_its_best(machine: Machine) -> Hardware:
    """Without what stages take beyond it."""
    found = device(machine)
    assert found.measured is not None
    return replace(
        found,
        measured=replace(
            found.measured, scoring_pace=1.0, update_launch_pace=1.0, rollout_pace=1.0
        ),
    )


def test_a_trunk_that_was_measured_is_planned_to_take_what_it_took() -> None:
    measured = machine()
    each, hardware = measured.passes[1], at_its_best(measured)
    setting = Setting(
        "sft", _shape(each), FP32, Workload(each.tokens, each.tokens, 1), hardware, OURS
    )
    forward = calibrated_pass(
        setting, setting.model, FP32, each.sequences, each.tokens, 0.0, training=False
    )
    training = calibrated_pass(
        setting, setting.model, FP32, each.sequences, each.tokens, 0.0, training=True
    )
    assert forward == pytest.approx(each.forward_seconds)
    # the gradient of an embedding of 64 entries comes on top
    assert training == pytest.approx(each.training_seconds, rel=1e-3)


def test_a_trainer_adds_what_its_smallest_step_took_beyond_launches() -> None:
    launched = (45 + 20) * 3e-3 / (2 * 45 + 20)
    assert rates(machine()).trainer_step_seconds == pytest.approx(5e-3 - launched)


def test_the_device_is_the_processor_at_its_best_rates() -> None:
    found = device(
        machine(
            streams=(
                Stream(bytes=2**14, bytes_per_second=5e10),
                Stream(bytes=2**26, bytes_per_second=5e9),
            )
        )
    )
    assert found.is_cpu
    assert found.peak("fp32") == pytest.approx(1e11)
    assert found.bandwidth_bytes_per_second == pytest.approx(5e9)  # beyond the caches


def test_an_accelerator_is_planned_by_the_roofline_of_its_own_peaks() -> None:
    products = (
        Product(dtype="fp32", rows=2048, width=4096, flops_per_second=5e13),
        Product(dtype="bf16", rows=2048, width=4096, flops_per_second=7e14),
    )
    found = device(machine(name="NVIDIA H100 80GB HBM3", products=products))
    assert found.measured is None
    assert found.peak("bf16") == pytest.approx(7e14)


def test_a_plan_that_names_no_device_is_for_the_calibrated_machine(tmp_path: Path) -> None:
    params = load(DEMO)
    before = target(params, None, 1, None, tmp_path).hardware
    written(tmp_path)
    after = target(params, None, 1, None, tmp_path).hardware
    assert before.measured is None
    assert after.measured is not None
    assert target(params, "a100-80", 1, None, tmp_path).hardware.name == "a100-80"


def test_starting_takes_what_it_took_here(tmp_path: Path) -> None:
    written(tmp_path)
    params = load(DEMO)
    stage = plan(params, target(params, None, 1, None, tmp_path), ("ppo",)).stages[0]
    assert stage.phases[0].seconds == pytest.approx(6.0, abs=0.5)


def test_a_trunk_under_bf16_is_planned_to_take_what_it_took() -> None:
    plain = machine().passes[1]
    slower = plain.model_copy(
        update={
            "forward_seconds": 1.5 * plain.forward_seconds,
            "training_seconds": 2 * plain.training_seconds,
        }
    )
    hardware, bf16 = at_its_best(machine(autocast=(slower,))), replace(FP32, dtype="bf16")
    work = Workload(plain.tokens, plain.tokens, 1)
    setting = Setting("sft", _shape(plain), FP32, work, hardware, OURS)
    for training, ratio in ((False, 1.5), (True, 2.0)):
        in_fp32, in_bf16 = (
            calibrated_pass(
                setting, setting.model, levers, plain.sequences, plain.tokens, 0.0, training
            )
            for levers in (FP32, bf16)
        )
        assert in_bf16 == pytest.approx(ratio * in_fp32)


def test_twice_the_speed_is_half_the_time() -> None:
    slow = machine()
    fast = machine(
        products=tuple(
            p.model_copy(update={"flops_per_second": 2 * p.flops_per_second}) for p in slow.products
        ),
        streams=tuple(
            s.model_copy(update={"bytes_per_second": 2 * s.bytes_per_second}) for s in slow.streams
        ),
        attention=tuple(
            a.model_copy(
                update=dict.fromkeys(
                    ("forward_flops_per_second", "training_flops_per_second"), 40000000000.0
                )
            )
            for a in slow.attention
        ),
        passes=tuple(
            p.model_copy(
                update={
                    "forward_seconds": p.forward_seconds / 2,
                    "training_seconds": p.training_seconds / 2,
                }
            )
            for p in slow.passes
        ),
        vocabulary=tuple(
            v.model_copy(
                update={
                    "forward_seconds": v.forward_seconds / 2,
                    "training_seconds": v.training_seconds / 2,
                }
            )
            for v in slow.vocabulary
        ),
    )
    setting = Setting(
        "sft", _shape(slow.passes[1], 512), FP32, Workload(48, 48, 1), at_its_best(slow), OURS
    )
    seconds = [
        calibrated_pass(
            replace(setting, hardware=at_its_best(each)),
            setting.model,
            FP32,
            32,
            48,
            1536,
            training=True,
        )
        for each in (slow, fast)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1])


@pytest.mark.parametrize(
    ("flags", "instructions"),
    [("avx2 fma", None), ("avx2 avx512_bf16", "avx512_bf16"), ("avx512_bf16 amx_bf16", "amx_bf16")],
)
def test_bf16_is_planned_at_the_rate_of_the_processors_instructions(
    tmp_path: Path, flags: str, instructions: str | None
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {flags}\nbugs : none\n")
    assert bf16_instructions(tmp_path / "cpuinfo") == instructions
    assert bf16_instructions(tmp_path / "none") is None
    found, table = unmeasured(instructions), hardware("cpu")
    faster = found.peak("bf16") / found.peak("fp32")
    assert faster > 1 if instructions else faster < 0.1
    assert found.peak("fp32") == table.peak("fp32")
    assert found.name == table.name


def test_no_file_is_no_machine(tmp_path: Path) -> None:
    assert this_machine(tmp_path) is None


@pytest.mark.parametrize("content", ["name: cpu\n", "[", "products: 3\n", "\x00"])
def test_a_damaged_file_says_to_calibrate_again(tmp_path: Path, content: str) -> None:
    written(tmp_path).write_text(content)
    with pytest.raises(CostError, match="Run rlhf calibrate again, or delete the file"):
        this_machine(tmp_path)


LOOP = from_config(
    {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "vocab_size": 320,
        "tie_word_embeddings": True,
    },
    "loop",
)
TINY = from_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
    },
    "tiny",
)


def test_what_updates_really_took_sets_the_pace_of_our_own_loops_and_of_no_trainer() -> None:
    plain = at_its_best(machine())
    assert plain.measured is not None
    paced = replace(
        plain, measured=replace(plain.measured, scoring_pace=2.0, update_launch_pace=3.0)
    )

    def seconds(stage: str, hardware: Hardware, training: bool) -> float:
        return calibrated_pass(
            Setting(stage, TINY, FP32, Workload(64, 64.0, 1.0), hardware, OURS),
            TINY,
            FP32,
            8,
            64,
            0.0,
            training,
        )

    for stage, ratio in {"ppo": 2, "rloo": 2, "grpo": 2, "sft": 1}.items():
        scored = seconds(stage, paced, training=False)
        assert scored == pytest.approx(ratio * seconds(stage, plain, training=False))
    launched = plain.measured.launch_seconds(TINY.layers * OURS.layer_ops + 20, training=True)
    for stage, more in {"ppo": 2, "rloo": 2, "grpo": 2, "sft": 0}.items():
        trained = seconds(stage, paced, training=True)
        assert trained == pytest.approx(seconds(stage, plain, training=True) + more * launched)


def test_the_updates_that_were_measured_are_planned_to_take_what_they_took() -> None:
    loop = machine().loop.model_copy(
        update={"rollout_seconds": 0.9, "scoring_seconds": 0.4, "update_seconds": 0.7}
    )
    roles = Rlhf(
        reward=LOOP.scored,
        value=LOOP.scored,
        batch=32,
        rollout_batch=32,
        ppo_epochs=2,
        mini_batches=2,
    )
    work = Workload(
        52,
        52.0,
        1.0,
        prompt_tokens=20,
        response_tokens=32,
        mean_response_tokens=32,
        micro_batch_tokens=1024,
    )
    setting = Setting(
        "ppo",
        LOOP,
        replace(FP32, micro_batch=19),
        work,
        device(machine(loop=loop)),
        OURS,
        rlhf=roles,
    )
    seconds = {name: spent for name, _, spent, _ in ppo_phases(setting)}
    assert seconds["rollout"] == pytest.approx(0.9)
    assert seconds["update"] == pytest.approx(0.7)
    assert seconds["score"] + seconds["reference"] + seconds["value"] == pytest.approx(0.4)


def test_an_adapter_costs_its_folding_and_the_thin_products_of_its_gradients() -> None:
    hardware = device(machine())
    lora = replace(FP32, tuning="lora", lora_rank=4, lora_modules=("q", "down"))
    setting = Setting("ppo", TINY, lora, Workload(64, 64.0, 1.0), hardware, OURS)
    own = hardware.measured
    assert own is not None
    weights = 64 * 64 + 128 * 64
    # streams at 10 GB/s: a weight is read and written; products at 100 GFLOP/s
    assert fold_seconds(own, setting, TINY, lora) == pytest.approx(
        2 * weights * (8 / 1e10 + 2 * 4 / 1e11)
    )
    assert adapter_gradient_seconds(own, TINY, lora, 100.0) == pytest.approx(
        4 * 2 * 4 * (64 + 64 + 128 + 64) * 100 / 1e11
    )
    assert (
        fold_seconds(own, setting, TINY, FP32)
        == adapter_gradient_seconds(own, TINY, FP32, 100.0)
        == 0
    )


@pytest.mark.parametrize("vocabulary", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tables_gradients_are_filled_written_and_added_as_often_as_they_are(
    tied: bool, vocabulary: bool
) -> None:
    own = rates(machine())
    shape = replace(_shape(machine().passes[1]), tied=tied)

    def fillings(accumulation: int) -> float:
        levers = replace(FP32, accumulation=accumulation)
        size = 4.0 * shape.vocab * shape.width
        return table_seconds(own, shape, levers, vocabulary) / own.addition_seconds(size, size)

    head = 3 if vocabulary else 0
    pair = 3 if vocabulary and tied else 0
    assert fillings(1) == pytest.approx(1 + head + pair)
    # both tables of an untied pair are added to those of earlier micro-batches
    added = 6 if vocabulary and not tied else 3
    assert fillings(2) == fillings(8) == pytest.approx(1 + head + pair + added)


@pytest.mark.parametrize(("tuning", "training", "pays"), [
    ("full", True, True), ("full", False, False), ("lora", True, False),
])  # fmt: skip
def test_only_training_all_weights_pays_for_the_gradients_of_the_tables(
    tuning: Any, training: bool, pays: bool
) -> None:
    measured = machine()
    each, hardware = measured.passes[1], at_its_best(measured)
    levers = replace(FP32, tuning=tuning)
    small = _shape(each)
    large = replace(small, vocab=1000 * small.vocab)
    setting = Setting("sft", small, levers, Workload(8, 8, 1), hardware, OURS)

    def seconds(shape: ModelShape) -> float:
        return calibrated_pass(setting, shape, levers, 4.0, 8, 0.0, training=training)

    own = rates(measured)
    tables = table_seconds(own, large, levers, False) - table_seconds(own, small, levers, False)
    assert seconds(large) - seconds(small) == pytest.approx(tables if pays else 0.0, abs=1e-9)
