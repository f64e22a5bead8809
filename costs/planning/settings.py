"""params.yaml -> Settings, one for each stage that runs a model.

Levers are read from a section only if it has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, floor
from typing import Any

from config.errors import CostError
from config.methods.dpo import Dpo
from config.methods.kto import Kto
from config.methods.registry import SAMPLING_METHODS
from config.records import STAGES
from config.schema import Params
from config.sections.distillation import Distill
from config.sections.levers import Lora
from config.sections.online import ActorCritic, Grouped, Online, SamplingLoop
from config.work import GAP_SAMPLE, NORMALISATION_PAIRS
from costs.formulas.setting import EVALUATED, Attention, Levers, Parallel, Rlhf, Setting, Workload
from costs.planning.machine import timings
from costs.planning.models import base_shape, reward_shape, student_shape
from costs.planning.reward_function import seconds_per_reply
from costs.planning.rows import Rows, count
from costs.planning.target import Target
from costs.tables.engines import engine
from costs.tables.shapes import ModelShape

PARALLEL: dict[str, Parallel] = {"none": "ddp", "zero2": "zero2", "zero3": "fsdp"}
"""Parallelism by the value of `sharding`."""
ATTENTION: dict[str, Attention] = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash"}


def settings(params: Params, target: Target) -> dict[str, Setting]:
    """One Setting for each stage that runs a model, those of other methods than `align.method` too; distill where
    there is a section for it.
    """
    rows, model = count(params, target.root), base_shape(params, target.root)
    return {stage: setting_of(params, target, stage, rows, model) for stage in STAGES if runs_a_model(params, stage)}


def runs_a_model(params: Params, stage: str) -> bool:
    """Whether a stage runs a model: not `data`, `distill` without a student, or `reward` with a function."""
    absent = {"data": True, "distill": params.distill is None, "reward": params.trained_reward is None}
    return not absent.get(stage, False)


def untimed(params: Params, target: Target) -> list[str]:
    """Stages of the run that its device never ran with these models (costs/planning/machine.py)."""
    stage_settings = settings(params, target)
    return [stage for stage in params.stages if stage in stage_settings and not timings(stage_settings[stage])]


def setting_of(params: Params, target: Target, stage: str, rows: Rows, model: ModelShape) -> Setting:
    """The Setting of a stage that runs a model, sharded according to `where`."""
    stage_target = target.of(params, stage)
    setting = replace(
        _SETTINGS[stage](params, stage_target, rows, model),
        rented=stage_target.rented,
        devices_per_node=stage_target.devices_per_node,
    )
    place = params.where.of(stage)
    parallel = PARALLEL[place.sharding]
    # a single process shards nothing, and so offloads nothing
    offloads = place.offload and parallel in ("zero2", "fsdp") and setting.gpus > 1
    return setting.with_levers(parallel=parallel, offload_optimizer=offloads, offload_weights=offloads)


def levers_of(params: Params, section: Mapping[str, Any], micro_batch: int, batch: int, gpus: int) -> Levers:
    """The levers of one stage. Raises CostError for incompatible batch, micro-batch and devices."""
    if batch % (micro_batch * gpus) and gpus > 1:
        if batch % gpus:
            raise CostError(
                f"a batch of {batch} does not split over {gpus} devices. Change batch_size in params.yaml, or --gpus."
            )
        micro_batch = max(m for m in range(1, int(micro_batch) + 1) if (batch // gpus) % m == 0)
    lora: Lora | None = section.get("lora")
    return Levers(
        tuning="lora" if lora else "full",
        lora_rank=lora.rank if lora else 8,
        lora_modules=tuple(lora.modules) if lora else ("q", "v"),
        lora_dropout=bool(lora.dropout) if lora else False,
        quantisation=params.model.quantisation if lora else None,
        dtype=params.model.dtype,
        weights_fp32=not lora and params.model.dtype != "fp32",
        optimizer=section.get("optimizer", "adamw"),
        micro_batch=micro_batch,
        accumulation=max(1, batch // (micro_batch * gpus)),
        checkpointing="full" if section.get("activation_checkpointing") else "none",
        attention=ATTENTION[params.model.attention],
    )


def response_tokens(rows: Rows, longest: int) -> float:
    """Mean tokens of a response: as many as the demonstrations have, whose length a policy learns with their
    content.
    """
    demonstrated = rows.sft_tokens - rows.prompt_tokens
    return min(1.0 * longest, demonstrated) if demonstrated >= 1 else 1.0 * longest


def decoded_tokens(rows: Rows, longest: int) -> float:
    """Tokens of the longest response of a batch: as many as the longest demonstration's."""
    demonstrated = rows.longest_sft - rows.prompt_tokens
    return max(response_tokens(rows, longest), min(1.0 * longest, demonstrated))


def _steps(rows: float, section: Any) -> float:
    steps = max(1.0, rows * section.epochs / section.batch_size)
    return steps if section.max_steps is None else min(steps, 1.0 * section.max_steps)


def validated(params: Params, section: Any, rows: float, held_out: float) -> float:
    """Rows of the validation and test split that a stage reads while it trains, at all checkpoints together
    (training/hf/validation.py).
    """
    fraction = params.data.validation_fraction
    if not fraction:
        return 0.0
    looks = ceil(_steps(rows, section) / section.checkpoint_every_steps)
    return looks * held_out * (1 + fraction / params.data.test_fraction)


def _sft(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    section = params.sft
    levers = levers_of(params, dict(section), section.micro_batch_size, section.batch_size, target.gpus)
    levers = replace(levers, loss="fused")
    work = Workload(
        floor(min(rows.longest_sft, section.max_length)),
        min(rows.sft_tokens, section.max_length),
        _steps(rows.sft, section),
        held_out=rows.sft_held_out + validated(params, section, rows.sft, rows.sft_held_out),
        masked=True,
    )
    return Setting("sft", model, levers, work, target.hardware, engine("ours"), target.gpus)


def _reward(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """Pairs: two sequences each."""
    section = params.trained_reward
    assert section is not None
    levers = levers_of(params, dict(section), section.micro_batch_size, section.batch_size, target.gpus)
    held_out = 2 * (rows.preference_held_out + min(NORMALISATION_PAIRS, rows.preference))
    held_out += 2 * validated(params, section, rows.preference, rows.preference_held_out)
    longest, mean, places = pair_lengths(rows, section.max_length, levers.attention)
    work = Workload(
        longest,
        mean,
        _steps(rows.preference, section),
        held_out=held_out,
        read_tokens=1 / mean,
        attention_places=places,
    )
    return Setting(
        "reward",
        reward_shape(params, model) or model,
        replace(levers, micro_batch=2 * levers.micro_batch),
        work,
        target.hardware,
        engine("ours"),
        target.gpus,
    )


def pair_lengths(rows: Rows, limit: int, attention: str) -> tuple[int, float, float]:
    """Longest and mean tokens that a sequence of a pair costs, half of what both begin with each, and attention's
    places for one of them (training/modeling/packing.py). With `eager` attention every sequence is read in full.
    """
    longest, mean = min(rows.longest_preference, limit), min(rows.preference_tokens, limit)
    if attention == "eager":
        return floor(longest), mean, 1.0
    shared = min(mean, rows.pair_tokens / 2)
    return ceil(min(longest, rows.longest_pair / 2)), shared, mean / shared


def _sampling(section: SamplingLoop, model: ModelShape, params: Params, target: Target, rows: Rows) -> Setting:
    """A loop that samples and trains `model`, without its other roles."""
    prompt, response = floor(rows.longest_prompt), section.max_new_tokens
    mean_response = response_tokens(rows, response)
    per_device = max(1, section.batch_size // target.gpus)
    micro = max(1, min(per_device, floor(section.micro_batch_tokens / (prompt + response))))
    base = levers_of(params, dict(section), 1, section.batch_size, target.gpus)
    levers = replace(base, micro_batch=micro, accumulation=max(1, per_device // section.num_mini_batches // micro))
    work = Workload(
        prompt + response,
        rows.prompt_tokens + mean_response,
        section.updates,
        prompt,
        response,
        mean_response,
        decoded_tokens(rows, response),
        micro_batch_tokens=1.0 * section.micro_batch_tokens,
    )
    return Setting(section.method, model, levers, work, target.hardware, engine("ours"), target.gpus)


def _loop(method: str, params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """A method of the loop, with a value model where it has a critic."""
    section: Online = params.section(method)
    critic = section if isinstance(section, ActorCritic) else None
    sampling = _sampling(section, model, params, target, rows)
    reward = params.trained_reward
    # a frozen model is stored like the base of adapters
    stored = replace(sampling.levers, tuning="lora", quantisation=params.model.quantisation, weights_fp32=False)
    judge, sft = (
        replace(stored, **adapter_of(lora)) if lora else None
        for lora in (reward.lora if reward is not None else None, params.sft.lora)
    )
    from_reward = critic is not None and critic.value_init == "reward"
    value = reward_shape(params, model) if from_reward else model.scored
    loop = Rlhf(
        layout=critic.layout if critic else "separate",
        reward=reward_shape(params, model),
        function_seconds=seconds_per_reply(params, target.root),
        value=value if critic and critic.layout != "shared_trunk" else None,
        batch=section.batch_size,
        group=section.responses_per_prompt,
        rollout_batch=section.rollout_batch_size,
        ppo_epochs=section.epochs,
        mini_batches=section.num_mini_batches,
        reward_levers=judge,
        value_levers=judge if section.lora and critic and critic.value_init == "reward" else None,
        ref_levers=sft,
        rescored=section.batch_size if section.recompute_logprobs else compared_responses(section.batch_size),
    )
    notes: tuple[str, ...] = ()
    if isinstance(section, Grouped) and section.refill is not None:
        notes = (
            f"{method}.refill: one batch an update is planned, and up to {section.refill.most_batches} are sampled",
        )
    return replace(sampling, rlhf=loop, assumptions=notes)


def adapter_of(lora: Lora | None) -> dict[str, Any]:
    """An adapter's rank and matrices as levers."""
    return {"lora_rank": lora.rank, "lora_modules": tuple(lora.modules)} if lora else {}


def compared_responses(batch: int) -> int:
    """Responses whose log-probs the loop recomputes for comparison: every n-th, so that there are GAP_SAMPLE or a few
    more.
    """
    return ceil(batch / max(1, batch // GAP_SAMPLE))


def _dpo(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """Pairs as in `_reward`; the reference reads every pair once, the held-out ones too."""
    section: Dpo = params.section("dpo")
    levers = levers_of(params, dict(section), section.micro_batch_size, section.batch_size, target.gpus)
    levers = replace(levers, micro_batch=2 * levers.micro_batch)
    longest, mean, places = pair_lengths(rows, section.max_length, levers.attention)
    in_replies = min(1.0, (rows.pair_tokens - rows.preference_tokens) / mean)  # all but the prompt
    held_out, every = 2 * rows.preference_held_out, 2 * (rows.preference + rows.preference_held_out)
    held_out += 2 * validated(params, section, rows.preference, rows.preference_held_out)
    work = Workload(
        longest,
        mean,
        _steps(rows.preference, section),
        held_out=held_out,
        reference_sequences=every,
        loss_tokens=in_replies,
        read_tokens=in_replies,
        attention_places=places,
    )
    return Setting("dpo", model, levers, work, target.hardware, engine("ours"), target.gpus)


def _kto(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """Rated replies, each with a reply to another prompt beside it that the reference and every check read too, with
    the prompt once.
    """
    section: Kto = params.section("kto")
    levers = levers_of(params, dict(section), section.micro_batch_size, section.batch_size, target.gpus)
    mean, longest = min(rows.rated_tokens, section.max_length), min(rows.longest_rated, section.max_length)
    in_replies = max(0.0, 1 - rows.prompt_tokens / mean)
    both = 2.0 if levers.attention == "eager" else 1 + in_replies
    checked = validated(params, section, rows.rated, rows.rated_held_out)
    work = Workload(
        floor(longest),
        mean,
        _steps(rows.rated, section),
        held_out=both * (rows.rated_held_out + checked),
        reference_sequences=both * (rows.rated + rows.rated_held_out),
        loss_tokens=in_replies,
        read_tokens=in_replies,
    )
    return Setting("kto", model, levers, work, target.hardware, engine("ours"), target.gpus)


def _distill(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """The student as the policy of the loop, with the aligned model as its teacher."""
    section: Distill = params.section("distill")
    student = student_shape(params, target.root, model)
    sampling = _sampling(section, student, params, target, rows)
    taught = 1 - section.sft_updates / section.updates
    loop = Rlhf(
        ref=False,
        teacher=model,
        teacher_quantisation=params.model.quantisation,
        student_share=section.lmbda * taught,
        taught_share=taught,
        batch=section.batch_size,
        group=section.responses_per_prompt,
        rollout_batch=section.rollout_batch_size,
        ppo_epochs=section.epochs,
        mini_batches=section.num_mini_batches,
    )
    return replace(sampling, rlhf=loop)


def _evaluate(params: Params, target: Target, rows: Rows, model: ModelShape) -> Setting:
    """Base, SFT, aligned model and student answer the held-out prompts; the reward model scores the answers. A student
    is planned as large as the others.
    """
    prompts = held_out_prompts(params, rows)
    return answering("evaluate", params, target, rows, model, prompts, evaluated(params))


def evaluated(params: Params) -> int:
    """Number of models that an evaluation runs."""
    return EVALUATED + (params.distill is not None)


def held_out_prompts(params: Params, rows: Rows) -> int:
    """Number of prompts compared: at most `evaluate.prompts`."""
    return ceil(max(1, min(params.evaluate.prompts, rows.prompts_held_out)))


def answering(
    stage: str, params: Params, target: Target, rows: Rows, model: ModelShape, prompts: int, models: int
) -> Setting:
    """`models` of one shape answer `prompts` each, and the answers are read."""
    section = params.evaluate
    prompt, response = floor(rows.longest_prompt), section.max_new_tokens
    levers = Levers(
        tuning="frozen",
        quantisation=params.model.quantisation,
        dtype=params.model.dtype,
        attention=ATTENTION[params.model.attention],
        micro_batch=min(section.batch_size, prompts),
    )
    batches = models * ceil(prompts / levers.micro_batch / target.gpus)
    mean_response = response_tokens(rows, response)
    work = Workload(
        prompt + response, rows.prompt_tokens + mean_response, batches, prompt, response,
        mean_response,
        decoded_tokens(rows, response),
        micro_batch_tokens=1.0 * section.batch_size * params.model.context_length,
    )  # fmt: skip
    return Setting(
        stage,
        model,
        levers,
        work,
        target.hardware,
        engine("ours"),
        target.gpus,
        rlhf=Rlhf(
            reward=reward_shape(params, model),
            function_seconds=seconds_per_reply(params, target.root),
            evaluated=models,
        ),
    )


_SETTINGS: dict[str, Callable[[Params, Target, Rows, ModelShape], Setting]] = {
    "sft": _sft,
    "reward": _reward,
    "dpo": _dpo,
    "kto": _kto,
    "distill": _distill,
    "evaluate": _evaluate,
    **{method: partial(_loop, method) for method in SAMPLING_METHODS},
}
