"""Generation: prefill, then one token per step for a batch that shrinks as sequences end."""

from costs.formulas.compute import Work, decode_step, forward_pass
from costs.formulas.memory import Moment, frozen_role, generating
from costs.formulas.setting import Levers, Setting
from costs.formulas.time import decode_duration, duration
from costs.tables.shapes import ModelShape


def generation(
    setting: Setting, shape: ModelShape, levers: Levers, batches: float | None = None, sequences: float | None = None
) -> list[tuple[str, Work, float, str]]:
    """(phase, work, seconds, bound) of prefill and decode for `batches` batches of `sequences` responses each on one
    device.

    The steps of a batch go on to its longest response; the work of a step counts the sequences that are still going,
    on average mean_response / response of them. A static cache of one sequence only is the batch-1 decode of serving.
    """
    work = setting.workload
    batches = work.steps * levers.accumulation if batches is None else batches
    sequences = 1.0 * levers.micro_batch if sequences is None else sequences
    prompts = setting.prompts_of(sequences)
    prefill = forward_pass(setting, shape, levers, prompts, max(1, work.prompt_tokens), prompts)
    steps = work.decoded_tokens or 1.0 * work.response_tokens
    going = sequences * work.response_mean / max(1.0, steps)
    step = decode_step(setting, shape, levers, max(1.0, going), work.prompt_tokens + steps / 2)
    first, later = duration(prefill, setting), decode_duration(step, setting)
    return [
        ("prefill", prefill.times(batches), first.seconds * batches, first.bound),
        ("decode", step.times(batches * steps), later.seconds * batches * steps, later.bound),
    ]


def generation_moment(setting: Setting, shape: ModelShape, levers: Levers, sequences: float | None = None) -> Moment:
    """Memory while a batch is generated: weights, the cache at full length, the logits of one position."""
    work = setting.workload
    held = generating(
        setting,
        shape,
        levers,
        1.0 * (sequences or levers.micro_batch),
        work.prompt_tokens + work.response_tokens,
        work.prompt_tokens,
    )
    return Moment("decode", {"policy": frozen_role(setting, shape, levers) | held})
