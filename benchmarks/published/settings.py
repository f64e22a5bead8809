"""A published run -> the Setting that the formulas plan, and a list of what was assumed."""

from dataclasses import dataclass, replace

from benchmarks.published.engines import Software, as_of, engine
from benchmarks.published.levers import in_fp8, levers_of
from benchmarks.published.row import GENERATING, LOOPS, Refused, Run
from benchmarks.published.tensor_parallel import part_of, reducing
from costs.formulas.memory import peak
from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.planning.moments import moments
from costs.tables.catalogue import Hardware, hardware
from costs.tables.rates import EFFICIENCY, Efficiency
from costs.tables.shapes import ModelShape

PCIE_BYTES_PER_SECOND = 12e9
EAGER_SECONDS = engine("transformers").op_seconds
GRAPH_LAYER_SECONDS = engine("gpt-fast").decode_layer_seconds
LARGEST_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Planned:
    """A Setting, and what of its run the formulas do not hold."""

    setting: Setting
    run: Run
    assumptions: tuple[str, ...]
    bubble: float = 1.0
    """Time over that of a pipeline without idle stages."""
    batch_stated: bool = True
    """Whether memory of a training pass is decided."""


def planned_of(run: Run, rates: Efficiency = EFFICIENCY) -> Planned:
    """The Setting of a run with its assumptions. Raises Refused where what decides is missing or contradicts another
    value.
    """
    notes: list[str] = []
    device, software = _device(run, notes), _engine(run, notes)
    if run.stage in LOOPS:
        return _loop(run, device, software, rates, notes)
    if run.stage in GENERATING:
        return _generating(run, device, software, rates, notes)
    return _training(run, device, software, rates, notes)


def _device(run: Run, notes: list[str]) -> Hardware:
    device = run.device
    if device is None:
        notes.append("device is not stated: memory alone is planned")
        device = hardware("a100-80")
    if run.interconnect == "pcie":
        slower = min(device.link_bytes_per_second, PCIE_BYTES_PER_SECOND)
        return replace(device, link_bytes_per_second=slower)
    return device


def _engine(run: Run, notes: list[str]) -> Software:
    result = run.engine
    if result is None:
        notes.append("engine is not stated: plain Transformers assumed")
        result = engine("transformers")
    if run.released is not None:
        result = as_of(result, run.released)
    if run.compiled is not None:
        result = replace(result, compiled=run.compiled)
    if run.compiled is False and not result.op_seconds:  # nor a graph: launched one by one
        result = replace(result, op_seconds=EAGER_SECONDS, decode_layer_seconds=0.0)
    if run.cuda_graphs and result.op_seconds:
        result = replace(result, op_seconds=0.0, decode_layer_seconds=GRAPH_LAYER_SECONDS)
    if run.fused_kernels:
        result = replace(result, loss="liger", fused_norm=True)
    return result


def model_parallel(run: Run) -> int:
    """Devices that hold one copy of the model between them."""
    return run.tensor_parallel * run.pipeline_parallel * run.context_parallel


def _gpus(run: Run, notes: list[str]) -> int:
    if run.gpus is not None:
        return run.gpus
    if run.stage == "pretrain":
        raise Refused("gpus is missing: time and memory of pretraining depend on it.")
    notes.append(f"gpus is not stated: {model_parallel(run)} assumed")
    return model_parallel(run)


def _batches(run: Run, gpus: int, notes: list[str]) -> tuple[int, int, bool]:
    """(micro-batch, accumulation, whether the micro-batch is stated)."""
    ways = gpus // model_parallel(run)
    micro, batch, steps = run.micro_batch, run.global_batch, run.accumulation
    if micro is None:
        assert batch is not None
        per_way = batch / ways
        if steps and per_way >= steps:
            return max(1, round(per_way / steps)), steps, True
        notes.append("micro_batch is not stated: one sequence a pass assumed, memory not planned")
        return 1, max(1, round(per_way)), False
    if batch is None:
        return micro, steps or 1, True
    passes = batch / (micro * ways)
    if steps and abs(passes - steps) > 0.01 * steps and passes >= 1:
        raise Refused(
            f"global_batch={batch:g} is not micro_batch={micro} x accumulation={steps} x {ways} "
            "data-parallel devices. Change one of them."
        )
    if batch < ways:
        raise Refused(
            f"global_batch={batch:g} is less than one sequence for each of {ways} data-parallel "
            "devices. Change either."
        )
    return micro, max(1, round(passes)), True


def padding(rows: int) -> float:
    """Longest over mean of so many rows whose lengths are exponential: the harmonic number."""
    return sum(1 / k for k in range(1, rows + 1))


def _lengths(run: Run, micro: int) -> tuple[int, float]:
    """(longest, mean) tokens of a sequence. A batch is padded to its longest row."""
    assert run.max_tokens is not None
    mean = run.mean_tokens
    if mean is None and run.row_tokens is not None:
        mean = run.max_tokens if run.packed else run.row_tokens * padding(micro)
    return run.max_tokens, min(float(run.max_tokens), mean or run.max_tokens)


def _training(run: Run, device: Hardware, software: Software, rates: Efficiency, notes: list[str]) -> Planned:
    gpus = _gpus(run, notes)
    micro, passes, stated = _batches(run, gpus, notes)
    tokens, mean = _lengths(run, micro)
    levers = replace(levers_of(run, software, gpus, notes), micro_batch=micro, accumulation=passes)
    device, efficiency = in_fp8(run, device, rates)
    model, bubble = _pipeline_stage(run, passes)
    ways = run.tensor_parallel
    model = part_of(model, ways)
    # norms and residual stream are divided by tokens (arXiv 2205.05198 section 4.2.2)
    software = replace(software, pointwise=software.pointwise / ways)
    share = gpus // run.pipeline_parallel // ways
    sequences = micro * passes * gpus / model_parallel(run)
    work = Workload(tokens, mean, _steps(run, sequences, mean))
    if run.stage == "dpo" and not run.ref_model:
        work = replace(work, reference_sequences=0.0)
    if run.context_parallel > 1:
        work = replace(work, micro_batch_tokens=micro * tokens / run.context_parallel)
    setting = Setting(
        run.stage, model, levers, work, device, software, share,
        devices_per_node=run.gpus_per_node, efficiency=efficiency, assumptions=tuple(notes),
    )  # fmt: skip
    return Planned(setting, run, tuple(notes), bubble, stated)


def _steps(run: Run, sequences: float, mean: float) -> float:
    """Optimizer steps of the whole job; 1 where the row does not say."""
    if run.train_tokens:
        return run.train_tokens / (sequences * mean)
    if run.steps:
        return run.steps * (1.0 if run.samples else run.epochs)
    return run.samples * run.epochs / sequences if run.samples else 1.0


def _pipeline_stage(run: Run, passes: int) -> tuple[ModelShape, float]:
    """The model of one pipeline stage, and time over that without idle stages (arXiv 2104.04473 section 2.2: 1 + (p -
    1) / (v m)).
    """
    stages = run.pipeline_parallel
    if stages == 1:
        return run.model, 1.0
    if run.model.layers < stages:
        raise Refused(
            f"pipeline_parallel={stages} is more than the {run.model.layers} layers of the model. Change it."
        )
    bubble = 1 + (stages - 1) / (run.virtual_pipeline * passes)
    return replace(run.model, layers=-(-run.model.layers // stages)), bubble


def _generating(run: Run, device: Hardware, software: Software, rates: Efficiency, notes: list[str]) -> Planned:
    gpus, batch = _gpus(run, notes), run.micro_batch or 1
    if run.dtype is None and not run.quantisation and run.stage != "load":
        notes.append("dtype is not stated: bf16 assumed")
    levers = Levers(
        tuning="frozen",
        dtype=run.dtype or "bf16",
        quantisation=run.quantisation,
        micro_batch=batch,
        attention="flash" if run.attention == "flash" else "sdpa",
    )
    prompt, response = _generated_lengths(run, batch, notes)
    work = Workload(
        max_tokens=prompt + response,
        mean_tokens=prompt + response,
        steps=1,
        prompt_tokens=prompt,
        response_tokens=response,
        mean_response_tokens=run.mean_response_tokens or response,
    )
    ways = run.tensor_parallel
    if ways > 1:
        software = reducing(software, run.model, batch, device, rates)
    setting = Setting(
        "serve", part_of(run.model, ways), levers, work, device, software, gpus // ways,
        efficiency=rates, assumptions=tuple(notes),
    )  # fmt: skip
    return Planned(setting, run, tuple(notes))


def _generated_lengths(run: Run, batch: int, notes: list[str]) -> tuple[int, int]:
    """(prompt, response) tokens. One sequence's cache is small, so that lengths may be missing."""
    if run.stage == "load":
        return 1, 1
    prompt, response = run.prompt_tokens, 1 if run.stage == "prefill" else run.response_tokens
    for key, value in (("prompt_tokens", prompt), ("response_tokens", response)):
        alone = batch == 1 or (key == "prompt_tokens" and response is not None)
        if value is None and (not alone or run.stage == "prefill"):
            raise Refused(f"{key} is missing: the cache of a batch and its time depend on it.")
        if value is None:
            notes.append(f"{key} is not stated: {10 if key == 'prompt_tokens' else 200} assumed")
    return prompt or 10, response or 200


def _loop(run: Run, device: Hardware, software: Software, rates: Efficiency, notes: list[str]) -> Planned:
    """PPO and its kin: an iteration rolls out, scores, and updates."""
    assert run.prompt_tokens is not None
    assert run.response_tokens is not None
    gpus = _gpus(run, notes)
    levers = levers_of(run, software, gpus, notes)
    ppo = run.stage == "ppo"
    for key, missing, assumed in (
        ("value_model", ppo and run.value_model is None, "as large as the policy"),
        ("reward_model", ppo and run.reward_model is None, "as large as the policy"),
        ("mini_batch", run.mini_batch is None, "one optimizer step an epoch"),
        ("ppo_epochs", run.ppo_epochs is None, "1"),
    ):
        if missing:
            notes.append(f"{key} is not stated: {assumed} assumed")
    prompt, response = run.prompt_tokens, run.response_tokens
    answered = run.mean_response_tokens or float(response)

    def made(side_by_side: int, micro: int, batch: int) -> Setting:
        loop = Rlhf(
            ref=run.ref_model,
            reward=run.reward_model or (run.model if ppo else None),
            value=(run.value_model or run.model) if ppo else None,
            batch=batch,
            rollout_batch=side_by_side,
            ppo_epochs=run.ppo_epochs or 1,
            mini_batches=max(1, round(batch / run.mini_batch)) if run.mini_batch else 1,
            rescored=batch,  # the old log-probs, by the model that learns
        )
        steps = run.samples / batch if run.samples else (run.steps or 1.0)
        passed = answered if run.packed else min(float(response), answered * padding(micro))
        work = Workload(prompt + response, prompt + passed, steps, prompt, response, answered)
        return Setting(
            run.stage, run.model, replace(levers, micro_batch=micro), work, device, software,
            gpus, devices_per_node=run.gpus_per_node, rlhf=loop, efficiency=rates,
            assumptions=tuple(notes),
        )  # fmt: skip

    if run.largest_batch:
        allowed = [
            made(size, size, size * gpus)
            for size in LARGEST_BATCHES
            if not run.max_global_batch or size * gpus <= run.max_global_batch
        ]
        if not allowed:
            raise Refused(
                f"max_global_batch={run.max_global_batch} is less than one sequence a device. Change either."
            )
        fitting = [s for s in allowed if peak(moments(s)).total < device.usable_bytes]
        return Planned((fitting or allowed[:1])[-1], run, tuple(notes))
    if run.micro_batch is None and run.generation_batch is None:
        raise Refused("micro_batch is missing: memory and time of a loop depend on it.")
    total, micro = run.rollout_batch, run.micro_batch or run.generation_batch or 1
    if total is None:
        total = micro * gpus
        notes.append(f"rollout_batch is not stated: {total} assumed, a micro-batch a device")
    # a server takes all that its cache has room for, whatever a pass of training holds
    side = run.generation_batch or (total if run.served else micro)
    return Planned(made(side, micro, total), run, tuple(notes))
