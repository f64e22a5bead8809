"""Printed facts -> the Setting that the formulas plan, with every assumption said.

A fact that decides and is missing is refused by name; what is filled in is listed in the setting's
`assumptions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costs.formulas.memory import peak
from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.planning.moments import moments
from costs.published.held import FP8_DEVICES, in_fp8, levers_of, quantisation
from costs.published.printed import Printed, read
from costs.published.words import Refused
from costs.tables.catalogue import Hardware, generation_of, hardware
from costs.tables.engine_names import as_of
from costs.tables.engines import Engine, engine
from costs.tables.shapes import ModelShape

DATASETS = {"alpaca": 135.0}
"""Data set -> mean tokens of a row with its template: Alpaca has 52,002 rows of about 570
characters.
"""
EAGER_SECONDS = engine("transformers").op_seconds
GRAPH_LAYER_SECONDS = engine("gpt-fast").decode_layer_seconds
SERVED = {"sharegpt": (161, 338), "alpaca": (19, 58)}
"""Data set -> mean tokens of a request and of its answer (arXiv 2309.06180 figure 11)."""
PLAIN_ON_HOPPER = 0.8
"""What PyTorch's own products reach of the rate of NVIDIA's stack on Hopper and later, which are
fast enough that tails of kernels show.
"""


@dataclass(frozen=True)
class Planned:
    """A Setting, and what of it the formulas do not hold."""

    setting: Setting
    printed: Printed
    assumptions: tuple[str, ...]
    bubble: float = 1.0
    """Time over that of a pipeline without idle stages."""
    batch_stated: bool = True
    """Whether memory of a training pass is decided."""


def setting_of(row: Mapping[str, Any]) -> Setting:
    """The Setting of a row or of a bare setting. Raises Refused with every word that is not
    understood and every fact that is missing.
    """
    return planned_of(row).setting


def planned_of(row: Mapping[str, Any]) -> Planned:
    """The Setting of a row (`setting: {...}`), with its assumptions. Raises Refused."""
    return from_printed(read(row.get("setting", row)))


def from_printed(said: Printed) -> Planned:
    notes: list[str] = []
    device = _device(said, notes)
    software = _engine(said, notes)
    if said.fp8 and not device.name.startswith(FP8_DEVICES):
        raise Refused([f"dtype fp8: {device.name} has no fp8 matrix products"])
    if said.dtype == "bf16" and not dict(device.peak_flops_per_second).get("bf16"):
        raise Refused([f"dtype bf16: {device.name} has no bf16 matrix products; fp16 or fp32"])
    if said.stage in ("ppo", "grpo", "rloo"):
        return _loop(said, device, software, notes)
    if said.stage in ("serve", "prefill", "load"):
        return _generating(said, device, software, notes)
    return _training(said, device, software, notes)


def _device(said: Printed, notes: list[str]) -> Hardware:
    device = said.device
    if device is None:
        notes.append("device not stated: memory alone is planned")
        device = hardware("a100-80")
    if said.interconnect == "pcie":
        return replace(device, link_bytes_per_second=min(device.link_bytes_per_second, 12e9))
    return device


def _engine(said: Printed, notes: list[str]) -> Engine:
    found = said.engine
    if found is None:
        if said.hybrid_engine:  # DeepSpeed's alone has one
            return engine("deepspeed-chat")
        notes.append("engine not stated: plain Transformers assumed")
        found = engine("transformers")
    if said.month is not None:
        found = as_of(found, said.month)
    compiled = said.compiled
    if said.rungs:
        compiled = compiled or len(said.rungs) > 2
    if compiled is not None:
        found = replace(found, compiled=compiled)
    if compiled is False and not found.op_seconds:  # nor a graph: launched one by one
        found = replace(found, op_seconds=EAGER_SECONDS, decode_layer_seconds=0.0)
    if said.cuda_graphs and found.op_seconds:
        found = replace(found, op_seconds=0.0, decode_layer_seconds=GRAPH_LAYER_SECONDS)
    if said.sequence_parallel is not None:
        found = replace(found, sequence_parallel=said.sequence_parallel)
    if said.liger:
        found = replace(found, loss="streamed", fused_norm=True)
    return found


def _gpus(said: Printed, notes: list[str]) -> int:
    model_parallel = said.tensor_parallel * said.pipeline_parallel * said.context_parallel
    if said.gpus is None:
        if said.data_parallel:
            return said.data_parallel * model_parallel
        if said.stage == "pretrain":
            raise Refused(["gpus is not stated: time and memory of pretraining depend on it"])
        if model_parallel == 1:
            notes.append("gpus not stated: one assumed")
        return model_parallel
    if said.gpus % model_parallel:
        raise Refused([f"gpus={said.gpus} does not split into {model_parallel} (TP x PP x CP)"])
    ways = said.gpus // model_parallel
    if said.shards and said.shards > 2 and said.shards not in (ways, ways * said.context_parallel):
        raise Refused([f"FSDP{said.shards} is not the {ways} ways that gpus={said.gpus} leave"])
    product = (said.data_parallel or 0) * model_parallel
    if product not in (0, said.gpus) and not (said.fsdp or said.zero):
        raise Refused([f"data_parallel={said.data_parallel} x {model_parallel} is not "
                       f"gpus={said.gpus}"])  # fmt: skip
    return said.gpus


def _batches(said: Printed, gpus: int, notes: list[str]) -> tuple[int, int, bool]:
    """(micro-batch, accumulation, whether the micro-batch is stated)."""
    ways = gpus // (said.tensor_parallel * said.pipeline_parallel * said.context_parallel)
    micro, whole, steps = said.micro_batch, said.global_batch, said.accumulation
    if micro is None and whole is None:
        raise Refused(["its batch is not stated: micro_batch or batch_size decides memory and "
                       "time"])  # fmt: skip
    if micro is None:
        assert whole is not None
        each = whole / ways
        if steps and each >= steps:
            return max(1, round(each / steps)), steps, True
        notes.append("micro_batch not stated: one sequence a pass assumed; memory is not planned")
        return 1, max(1, round(each)), False
    if whole is None:
        return micro, steps or 1, True
    passes = whole / (micro * ways)
    if steps and abs(passes - steps) > 0.01 * steps and passes >= 1:
        raise Refused([f"global_batch={whole:g} is not micro_batch={micro} x grad_accum={steps} x "
                       f"{ways} ways of data"])  # fmt: skip
    if passes < 1 and whole < ways:
        raise Refused([f"global_batch={whole:g} is less than one sequence for each of {ways} "
                       "devices"])  # fmt: skip
    return micro, max(1, round(passes)), True


def _lengths(said: Printed, micro: int) -> tuple[int, float]:
    """(longest, mean) tokens of a sequence. A batch is padded to its longest row: of rows with
    exponential lengths, the harmonic number.
    """
    mean = DATASETS.get(str(said.dataset).lower())
    padded = mean and mean * sum(1 / k for k in range(1, micro + 1))
    longest = said.longest or said.tokens
    if longest is None:
        raise Refused(["its sequence length is not stated: seq_len decides memory and time"])
    if said.mean_tokens:
        return longest, min(float(longest), said.mean_tokens)
    if padded and not said.packed:
        return longest, min(float(longest), padded)
    return longest, float(longest)


def _training(said: Printed, device: Hardware, software: Engine, notes: list[str]) -> Planned:
    if said.prompt and said.response and not said.tokens:
        said = replace(said, tokens=said.prompt + said.response)
    gpus = _gpus(said, notes)
    if said.layer_split and gpus > 1:
        raise Refused(["layers split over devices one after the other have no formula here"])
    if said.rungs == ("baseline",) and not said.longest and not said.mean_tokens:
        raise Refused(["baseline is not packed: longest_seq or mean_seq of its rows decides memory "
                       "and time"])  # fmt: skip
    if said.rungs and said.tuning is None:
        said = replace(said, tuning="full")
    micro, passes, stated = _batches(said, gpus, notes)
    tokens, mean = _lengths(said, micro)
    levers = replace(levers_of(said, software, gpus, notes), micro_batch=micro, accumulation=passes)
    device, efficiency = in_fp8(said, device)
    if generation_of(device.name) in ("hopper", "blackwell") and software.name != "megatron":
        efficiency = replace(efficiency, matmul=efficiency.matmul * PLAIN_ON_HOPPER)
    model, bubble = _one_stage(said, passes)
    share = gpus // said.pipeline_parallel
    work = Workload(tokens, mean, 1.0)
    if said.context_parallel > 1:
        work = replace(work, micro_batch_tokens=micro * tokens / said.context_parallel)
    sequences = micro * passes * share / said.tensor_parallel / said.context_parallel
    steps = _steps(said, sequences, mean)
    setting = Setting(
        said.stage,
        model,
        levers,
        replace(work, steps=steps),
        device,
        software,
        share,
        devices_per_node=said.gpus_per_node or 8,
        efficiency=efficiency,
        assumptions=tuple(notes),
    )
    return Planned(setting, said, tuple(notes), bubble, stated)


def _steps(said: Printed, sequences: float, mean: float) -> float:
    if said.train_tokens:
        return said.train_tokens / (sequences * mean)
    if said.steps:
        return said.steps * (said.epochs if said.steps and not said.samples else 1.0)
    if said.samples:
        return said.samples * said.epochs / sequences
    return 1.0


def _one_stage(said: Printed, passes: int) -> tuple[ModelShape, float]:
    """The model of one pipeline stage, and what the pipeline's idle time comes to (arXiv 2104.04473
    section 2.2: (p - 1) / (v m)).
    """
    stages = said.pipeline_parallel
    if stages == 1:
        return said.model, 1.0
    if said.model.layers % stages and said.model.layers < stages:
        raise Refused([f"{said.model.layers} layers do not split into {stages} pipeline stages"])
    bubble = 1 + (stages - 1) / (said.virtual_pipeline * passes)
    return replace(said.model, layers=-(-said.model.layers // stages)), bubble


def _generating(said: Printed, device: Hardware, software: Engine, notes: list[str]) -> Planned:
    gpus = _gpus(said, notes)
    parallel = said.tensor_parallel
    if gpus > parallel:
        if parallel == 1 and (software.name != "transformers" or said.layer_split):
            parallel = gpus
        notes.append(f"{gpus} devices hold one model")
    quant = quantisation(said, "frozen")
    dtype = said.dtype or "bf16"
    if said.dtype is None and said.quant is None and not said.fp8 and said.stage != "load":
        notes.append("dtype not stated: bf16 assumed")
    if said.fp8:
        quant = "fp8"
    cache = said.kv_cache or ("fp8" if quant == "fp8" and software.fp8_cache else None)
    levers = Levers(
        cache_dtype=cache,
        tuning="frozen",
        dtype=dtype,
        quantisation=quant,
        tensor_parallel=parallel,
        micro_batch=said.micro_batch or 1,
        attention="flash" if said.attention == "flash" else "sdpa",
    )
    if said.micro_batch is None and said.stage != "load":
        raise Refused(["its batch is not stated: batch_size decides memory and time"])
    prompt, response = said.prompt, said.response
    if said.stage == "prefill":
        if prompt is None:
            raise Refused(["prompt_len is not stated: the time to the first token depends on it"])
        response = 1
    if said.stage == "load":
        prompt, response = 1, 1
    short = levers.micro_batch == 1
    served = SERVED.get(str(said.dataset).lower().split(",")[0])
    if served and prompt is None and response is None:
        prompt, response = served
        notes.append(f"lengths of {said.dataset}: {prompt} tokens in, {response} out on average")
    if prompt is None:
        if not short and not response:
            raise Refused(["prompt_len is not stated: a batch's cache and time depend on it"])
        prompt = 10
        notes.append("prompt_len not stated: 10 tokens assumed")
    if response is None:
        if not short:
            raise Refused(["gen_len is not stated: a batch's cache and time depend on it"])
        response = 200
        notes.append("gen_len not stated: 200 tokens assumed, one sequence's cache is small")
    work = Workload(
        max_tokens=prompt + response,
        mean_tokens=prompt + response,
        steps=1,
        prompt_tokens=prompt,
        response_tokens=response,
        mean_response_tokens=response,
    )
    device, efficiency = in_fp8(said, device)
    setting = Setting(
        "serve", said.model, levers, work, device, software, max(gpus, parallel),
        efficiency=efficiency, assumptions=tuple(notes),
    )  # fmt: skip
    return Planned(setting, said, tuple(notes))


def _loop(said: Printed, device: Hardware, software: Engine, notes: list[str]) -> Planned:
    """PPO and its kin: an iteration rolls out, scores, and updates."""
    prompt, new = said.prompt, said.response
    if prompt is None or new is None:
        raise Refused(["prompt_len and gen_len decide memory and time of a rollout"])
    lengths = (prompt + new, prompt, new)
    gpus = _gpus(said, notes)
    said = said if said.tuning else replace(said, tuning="full")
    levers = levers_of(said, software, gpus, notes)
    group = said.group_size or 1
    total = said.rollout_batch or (said.prompts * group if said.prompts else None)
    total = total or (int(said.global_batch) if said.global_batch else None)
    value = (said.critic or said.model) if said.stage == "ppo" else None
    notes += [
        f"{what} not stated: {assumed} assumed"
        for what, given, assumed in (
            ("critic", said.critic or said.stage != "ppo", "as large as the policy"),
            ("reward", said.reward or said.stage != "ppo", "as large as the policy"),
            ("train_batch", said.train_batch, "one optimizer step an epoch"),
            ("ppo_epochs", said.ppo_epochs_stated, "1"),
        )
        if not given
    ]
    each = said.train_micro_batch or said.micro_batch

    def made(side_by_side: int, micro: int, batch: int) -> Setting:
        mini = max(1, round(batch / said.train_batch)) if said.train_batch else 1
        loop = Rlhf(
            ref=said.ref,
            reward=said.reward or (said.model if said.stage == "ppo" else None),
            value=value,
            batch=batch,
            rollout_batch=side_by_side,
            ppo_epochs=said.ppo_epochs,
            mini_batches=mini,
        )
        steps = said.samples / batch if said.samples else (said.steps or 1.0)
        longest, asked, answered = lengths
        work = Workload(longest, longest, steps, asked, answered, answered)
        return Setting(
            said.stage, said.model, replace(levers, micro_batch=micro), work, device, software,
            gpus, devices_per_node=said.gpus_per_node or 8, rlhf=loop, assumptions=tuple(notes),
        )  # fmt: skip

    if said.largest_batch:
        best: Setting | None = None
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            if said.max_global_batch and size * gpus > said.max_global_batch:
                break
            candidate = made(size, size, size * gpus)
            if best is None or peak(moments(candidate)).total < device.usable_bytes:
                best = candidate
        if best is None:
            raise Refused(["not even one sequence a device is within max_global_batch_pairs"])
        return Planned(best, said, tuple(notes))
    if total is None:
        if each is None:
            raise Refused(["rollout_batch is not stated: time of an iteration depends on it"])
        total = each * gpus
        notes.append(f"rollout_batch not stated: {total} assumed, a micro-batch a device")
    if each is None and said.gen_micro_batch is None:
        raise Refused(["micro_batch is not stated: memory and time of a loop depend on it"])
    side = said.gen_micro_batch or each or 1
    return Planned(made(side, each or side, total), said, tuple(notes))
