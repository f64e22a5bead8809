"""The machine that `rlhf calibrate` measured, as a device of the planner.

Shares and launches are what is left of a whole trunk's time beside its products and attention, so
that the formulas of costs/formulas/calibrated.py that predict a stage are the ones that were
calibrated.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from config.errors import CostError
from config.workspace.machine import (
    MACHINE_FILE,
    Generation,
    Loop,
    Machine,
    Passes,
    Trunk,
    Vocabulary,
)
from config.yaml_text import yaml_content
from costs.formulas.calibrated import calibrated_decode, calibrated_pass
from costs.formulas.counts import forward_attention_flops, forward_matmul_flops, pointwise_bytes
from costs.formulas.ppo import ppo_phases
from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.tables.catalogue import GIB, Hardware, hardware, hardware_row
from costs.tables.engines import engine
from costs.tables.measured import Measured, Points
from costs.tables.shapes import ModelShape, from_config

CALIBRATED_CPU = "cpu-calibrated"
"""A name of its own: plans for the table's `cpu` have other errors."""
M = TypeVar("M", bound=BaseModel)
OURS = engine("ours")
FP32 = Levers(dtype="fp32")
BF16_SPEEDUP = 1.8
"""Of whole training passes over fp32 with AVX512-BF16: SmolLM2-135M, 256 tokens, forward and
backward on one thread of an EPYC, 162 against 89 tokens/s (20 November 2026). AMX is taken to be as
fast; its matrix products alone are faster.
"""
SMALLEST_SHARE = 0.1
"""A share of the streams' time below this says that products or launches were measured too slow."""


def this_machine(root: Path) -> Hardware | None:
    """The calibrated device of the project at `root`, None if it was not calibrated.

    Raises CostError for a file that cannot be read.
    """
    found = calibration(root / MACHINE_FILE, Machine)
    return None if found is None else device(found)


def calibration(path: Path, kind: type[M]) -> M | None:
    """What `rlhf calibrate` wrote to a file, None if it is not there. Raises CostError for a file
    that cannot be read.
    """
    try:
        return kind.model_validate(yaml_content(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise CostError(
            f"{path} is damaged or of an earlier version: {first}. Run rlhf calibrate again, or "
            "delete the file."
        ) from None


def unmeasured(instructions: str | None) -> Hardware:
    """The table's CPU, with the rate of bf16 products that the processor's instructions allow."""
    found = hardware("cpu")
    if instructions is None:
        return found
    peaks = dict(found.peak_flops_per_second)
    peaks["bf16"] = BF16_SPEEDUP * peaks["fp32"]
    return replace(found, peak_flops_per_second=tuple(peaks.items()))


def device(machine: Machine) -> Hardware:
    """A device with the machine's rates; power is the catalogue's, as it cannot be measured."""
    try:
        known = hardware(machine.name)
    except CostError:
        known = hardware("cpu")
    best = {
        dtype: max(p.flops_per_second for p in machine.products if p.dtype == dtype)
        for dtype in {p.dtype for p in machine.products}
    }
    row = {
        "memory_gib": machine.memory_bytes / GIB,
        "usable_gib": machine.usable_bytes / GIB,
        "watts": known.watts,
        "bandwidth_gb_per_second": min(s.bytes_per_second for s in machine.streams) / 1e9,
        "link_gb_per_second": known.link_bytes_per_second / 1e9,
        "network_gb_per_second": known.network_bytes_per_second / 1e9,
        **{f"{dtype}_tflops": rate / 1e12 for dtype, rate in best.items()},
        "source": f"measured by rlhf calibrate on {machine.processor} with {machine.threads} "
        f"thread{'s' * (machine.threads > 1)}",
        "date": machine.date,
        "attainable": 1.0,
    }
    if machine.name == "cpu":
        return hardware_row(CALIBRATED_CPU, row, rates(machine))
    return hardware_row(machine.name, row)


def rates(machine: Machine) -> Measured:
    """What follows from the machine's measurements of whole trunks."""
    tiny = min(machine.passes, key=lambda each: each.sequences * each.tokens * each.width)
    launched = launches(tiny.layers)
    bare = Measured(
        machine,
        tiny.forward_seconds / launched,
        tiny.training_seconds / launched,
        (),
        (),
        (),
        (),
        0.0,
    )
    larger = sorted((each for each in machine.passes if each is not tiny), key=_tensor_bytes)
    forward = tuple(
        (_tensor_bytes(each), _stream_share(bare, each, training=False)) for each in larger
    )
    training = tuple(
        (_tensor_bytes(each), _stream_share(bare, each, training=True)) for each in larger
    )
    logits = sorted(machine.vocabulary, key=lambda each: each.vocab)
    logit_seconds = [
        tuple((float(each.vocab), _logit_seconds(bare, each, training)) for each in logits)
        for training in (False, True)
    ]
    trainer = machine.stages["sft"].step_seconds - launches(1) * bare.training_op_seconds
    found = replace(
        bare,
        forward_stream_share=_merged(forward),
        training_stream_share=_merged(training),
        forward_logit_seconds=logit_seconds[0],
        training_logit_seconds=logit_seconds[1],
        trainer_step_seconds=max(0.0, trainer),
    )
    found = replace(
        found,
        forward_autocast=_autocast(machine, training=False),
        training_autocast=_autocast(machine, training=True),
    )
    found = replace(
        found, decode_share=median(_decode_share(found, each) for each in machine.generation)
    )
    return _paced(found, machine.loop)


def _autocast(machine: Machine, training: bool) -> Points:
    """How much longer each trunk takes under bf16 autocast than in fp32, by its tensors."""
    name = "training_seconds" if training else "forward_seconds"
    plain = {_sizes(each): each for each in machine.passes}
    return tuple(
        (_tensor_bytes(each), getattr(each, name) / getattr(plain[_sizes(each)], name))
        for each in sorted(machine.autocast, key=_tensor_bytes)
        if _sizes(each) in plain
    )


def _sizes(each: Passes) -> tuple[int, ...]:
    return (each.width, each.layers, each.heads, each.mlp_width, each.sequences, each.tokens)


def _paced(found: Measured, loop: Loop) -> Measured:
    """With the paces: updates of PPO as they were measured, over what the formulas say for them."""
    shape, longest = _shape(loop, loop.vocab), round(loop.prompt_tokens) + loop.response_tokens
    roles = Rlhf(
        reward=shape.scored,
        value=shape.scored,
        batch=loop.sequences,
        rollout_batch=loop.sequences,
        ppo_epochs=loop.epochs,
        mini_batches=loop.mini_batches,
    )
    work = Workload(
        longest,
        loop.prompt_tokens + loop.response_tokens,
        1.0,
        prompt_tokens=round(loop.prompt_tokens),
        response_tokens=loop.response_tokens,
        mean_response_tokens=loop.response_tokens,
        micro_batch_tokens=loop.micro_batch_tokens,
    )
    levers = replace(
        FP32, micro_batch=max(1, min(loop.sequences, loop.micro_batch_tokens // longest))
    )

    def planned(own: Measured) -> dict[str, float]:
        return {
            name: seconds
            for name, _, seconds, _ in ppo_phases(
                Setting("ppo", shape, levers, work, _lent(own), OURS, rlhf=roles)
            )
        }

    slower, plain = slowdown(loop.trunks, found.machine), planned(found)
    found = replace(
        found,
        scoring_pace=loop.scoring_seconds
        / slower
        / (plain["score"] + plain["reference"] + plain["value"]),
    )
    # prompts are read at the pace of scoring, and an optimizer step at none: what the other two
    # paces act on grows with them
    one, two = planned(found), planned(replace(found, rollout_pace=2.0, update_launch_pace=2.0))

    def pace(phase: str, measured: float) -> float:
        return max(SMALLEST_SHARE, 1 + (measured / slower - one[phase]) / (two[phase] - one[phase]))

    return replace(
        found,
        rollout_pace=pace("rollout", loop.rollout_seconds),
        update_launch_pace=pace("update", loop.update_seconds),
    )


def slowdown(now: Iterable[Passes], machine: Machine) -> float:
    """How much longer trunks take `now` than as the machine was calibrated: the median, forward and
    with gradients; 1 if it knows none of them.
    """
    ratios = []
    for each in now:
        sizes = each.model_dump(exclude={"forward_seconds", "training_seconds"}).items()
        for then in (known for known in machine.passes if sizes <= known.model_dump().items()):
            ratios += [
                each.forward_seconds / then.forward_seconds,
                each.training_seconds / then.training_seconds,
            ]
    return median(ratios) if ratios else 1.0


def _lent(found: Measured) -> Hardware:
    """A device with these rates, for settings that are never planned."""
    return hardware_row(
        "cpu",
        {**CPU_ROW, "memory_gib": 1.0, "fp32_tflops": 0.1, "bandwidth_gb_per_second": 10.0},
        found,
    )


def _decode_share(found: Measured, each: Generation) -> float:
    """What is left of a generation beside prefill, launches and drawing, over what the formulas say
    for it.
    """
    shape = _shape(each, each.vocab)
    work = Workload(each.prompt_tokens + each.new_tokens, float(each.prompt_tokens), 1.0)
    setting = Setting("serve", shape, FP32, work, _lent(found), OURS)
    prefill = calibrated_pass(
        setting, shape, FP32, each.sequences, each.prompt_tokens, each.sequences, training=False
    )
    beside = found.decode_launch_seconds(shape.layers) + found.sampling_seconds(
        each.sequences, each.vocab, each.width
    )
    step = calibrated_decode(
        setting, shape, FP32, each.sequences, each.prompt_tokens + each.new_tokens / 2
    )
    left = (each.seconds - prefill) / each.new_tokens - beside
    return max(SMALLEST_SHARE, left / (step - beside))


def launches(layers: int) -> float:
    """Forward operations of a trunk."""
    return layers * OURS.layer_ops + 20


def _merged(points: Points) -> Points:
    """One value for each size: the median of those within a factor of two."""
    found: list[tuple[float, list[float]]] = []
    for size, value in points:
        if found and size < 2 * found[-1][0]:
            found[-1][1].append(value)
        else:
            found.append((size, [value]))
    return tuple((size, median(values)) for size, values in found)


def _tensor_bytes(each: Passes) -> float:
    return 4.0 * each.sequences * each.tokens * each.width


CPU_ROW = {"watts": 1.0, "source": "calibration", "date": "today"}
"""A device that lends its rates to a setting and is never planned for."""


def _shape(each: Trunk, vocab: int = 64) -> ModelShape:
    config = {
        "model_type": "llama",
        "hidden_size": each.width,
        "num_hidden_layers": each.layers,
        "num_attention_heads": each.heads,
        "num_key_value_heads": each.heads,
        "intermediate_size": each.mlp_width,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    return from_config(config, "calibration")


def _stream_share(bare: Measured, each: Passes, training: bool) -> float:
    shape, tokens = _shape(each), float(each.sequences * each.tokens)
    passes = 3.0 if training else 1.0
    products = bare.product_seconds(
        passes * forward_matmul_flops(shape, tokens, 0.0), tokens, each.width
    )
    attention = forward_attention_flops(shape, each.sequences, each.tokens) * (
        3.5 if training else 1.0
    )
    known = (
        products
        + bare.attention_seconds(attention, each.tokens, training)
        + bare.launch_seconds(launches(each.layers), training)
    )
    streams = bare.addition_seconds(
        passes * pointwise_bytes(shape, FP32, OURS, tokens), _tensor_bytes(each)
    )
    left = (each.training_seconds if training else each.forward_seconds) - known
    return max(SMALLEST_SHARE, left / streams)


def _logit_seconds(bare: Measured, each: Vocabulary, training: bool) -> float:
    """Beside the products: one forward, one again and two backward."""
    logits = float(each.tokens * each.vocab)
    products = bare.product_seconds(
        (4 if training else 1) * 2 * logits * each.width, each.tokens, each.width
    )
    return max(
        1e-11, ((each.training_seconds if training else each.forward_seconds) - products) / logits
    )
