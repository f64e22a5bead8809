"""Published measurements against the formulas: rows of a truth table -> Settings -> predictions -> errors by source.

A row is predicted from the setting it prints and from facts about its software; nothing is fitted to a row. What a source leaves
open is filled with the assumption named here, and a row that leaves open too much is refused with the reason.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from config.errors import CostError
from costs.catalogue import hardware, shape
from costs.engines import Engine, engine
from costs.generation import generation, generation_moment
from costs.memory import Moment, peak
from costs.setting import Levers, Rlhf, Setting, Workload
from costs.shapes import ModelShape, from_config
from costs.stages import moments, phases, step_seconds
from costs.time import EFFICIENCY, Efficiency

ALPACA_MEAN_TOKENS = 135
"""Mean length of the Alpaca rows with their template, in tokens: 52,002 rows of about 570 characters."""
CLUSTER_GPUS = 2048
"""LLaMA was trained on 2048 devices (arXiv 2302.13971 section 2.4)."""
GIB, GB, MIB = 2**30, 1e9, 2**20


@dataclass(frozen=True)
class Case:
    """One printed number and what we say it is."""

    id: str
    source: str
    tier: str
    quantity: str
    """memory, or time (throughputs are compared as seconds per unit of work)."""
    measured: float
    predicted: float
    detail: str

    @property
    def error(self) -> float:
        """Relative error of the prediction; of a throughput, of the time it stands for."""
        return self.predicted / self.measured - 1


def cases(row: Mapping[str, Any], efficiency: Efficiency = EFFICIENCY) -> list[Case]:
    """The comparisons that a row allows. Raises CostError with the reason where its setting is incomplete."""
    _ = efficiency
    if row["kind"] in ("price",):
        raise CostError("a price, not a measurement")
    setting, measured, notes = setting_of(row), row["measured"], str(row.get("notes", ""))
    _ = notes
    found: list[Case] = []
    for value, unit in [(measured["value"], str(measured["unit"])), *((v, k) for k, v in measured.get("also", {}).items())]:
        case = _case(row, setting, value, unit)
        if case:
            found.append(case)
    return found


def _case(row: Mapping[str, Any], setting: Setting, value: Any, unit: str) -> Case | None:
    make = lambda quantity, measured, predicted, detail="": Case(row["id"], row["source"]["title"], row["tier"], quantity, measured, predicted, detail)  # noqa: E731
    if isinstance(value, str):
        return None  # "> 40 GB": feasibility, see `feasible`
    lowered = unit.lower()
    if re.match(r"(gib|gb|mb|max_gpu_ram_gb)", lowered):
        scale = GIB if lowered.startswith("gib") else MIB if lowered.startswith("mb") else GB
        predicted, detail = memory(row, setting, lowered)
        return make("memory", value * scale, predicted, detail)
    if lowered.startswith("tokens") or lowered.startswith("samples"):
        return make("time", 1 / value, seconds_per_unit(row, setting, lowered))
    if lowered.startswith("minutes_per_1000"):
        once = step_seconds(replace(setting, levers=replace(setting.levers, accumulation=1)))
        return make("time", value * 60 / 1000, once.seconds)
    if lowered in ("hours", "gpu-hours"):
        total = sum(phase.seconds for phase in phases(setting)) / 3600
        return make("time", value, total * (setting.gpus if lowered == "gpu-hours" else 1))
    return None  # utilisations follow from the throughput


def memory(row: Mapping[str, Any], setting: Setting, unit: str) -> tuple[float, str]:
    """Bytes of one device as the source measured them, and the moment of the peak."""
    if "kernels" in unit:
        return setting.engine.context_bytes, "context"
    if "model load" in unit:
        return setting.engine.context_bytes + setting.model.parameters * setting.levers.weight_bytes, "weights"
    if setting.stage == "serve":
        held = generation_moment(setting, setting.model, setting.levers)
        return held.total, held.phase
    held_moments = moments(setting)
    highest = peak(held_moments)
    if "mb used" in unit:  # nvidia-smi: blocks that one part has freed do not serve another of other sizes
        return setting.engine.context_bytes + reserved(held_moments), "reserved"
    return highest.total, highest.phase


def reserved(held: list[Moment]) -> float:
    """Bytes that the allocator ends up holding when no part's blocks serve another part: the sum of each part's own maximum."""
    parts = {(role, part) for moment in held for role, sizes in moment.roles.items() for part in sizes}
    return sum(max(moment.roles.get(role, {}).get(part, 0.0) for moment in held) for role, part in parts)


def seconds_per_unit(row: Mapping[str, Any], setting: Setting, unit: str) -> float:
    """Seconds for one token (or sample) at the printed meaning of a throughput: of one device or of all."""
    if setting.stage == "serve":
        decode = generation(setting, setting.model, setting.levers)[1]
        return decode[2] / (setting.workload.response_tokens * setting.levers.micro_batch)
    per_step = step_seconds(setting).seconds
    units = setting.levers.micro_batch * setting.levers.accumulation * (1 if unit.startswith("samples") else setting.workload.mean_tokens)
    devices = 1 if "per gpu" in unit else setting.data_parallel
    return per_step / (units * devices)


# ---------------------------------------------------------------- from the printed setting to ours


def setting_of(row: Mapping[str, Any]) -> Setting:
    """The Setting of a row. Raises CostError where too much is left open."""
    printed = row["setting"]
    device = hardware(str(printed["gpu"]))
    software, dated = engine_of(row)
    if printed.get("stage") == "ppo_step3_rlhf":
        return _deepspeed_chat(printed, software)
    model = model_of(printed)
    if printed.get("stage") == "inference":
        return _inference(printed, model, software, dated)
    levers = levers_of(printed, software)
    tokens, mean = lengths(printed, levers)
    gpus = int(printed.get("gpus", CLUSTER_GPUS if printed.get("stage") == "pretrain" else 1))
    steps = 1.0
    if printed.get("tokens"):
        steps = float(printed["tokens"]) / (levers.micro_batch * levers.accumulation * gpus * mean)
    return Setting("pretrain" if printed.get("stage") == "pretrain" else "sft", model, levers, Workload(tokens, mean, steps), device, software, gpus)


def engine_of(row: Mapping[str, Any]) -> tuple[Engine, bool]:
    """The engine's facts by its printed name and the version in the source's title."""
    name, title, printed = str(row["setting"].get("engine", "")).lower(), row["source"]["title"].lower(), row["setting"]
    technique = str(printed.get("cumulative_technique", ""))
    compiled = bool(printed.get("compile")) or "torch.compile" in str(printed.get("tuning", "")) or technique not in ("", "baseline", "+packed")
    if "torchtune" in name:
        old = re.search(r"(apr|may|jun|jul|aug|sep) 2024|a9180b537|ca0a6de40", title) is not None
        return engine("torchtune-2024" if old else "torchtune", compiled), old
    for key, ours in (("litgpt", "litgpt"), ("foundry", "llm-foundry"), ("gpt-fast", "gpt-fast"), ("deepspeed-chat", "deepspeed-chat"), ("hf trainer", "transformers-2022"), ("vllm", "vllm")):
        if key in name:
            return engine(ours), False
    if "llama-1" in title or "megatron" in name:
        return engine("megatron"), False
    return engine("transformers-2022"), False


def model_of(printed: Mapping[str, Any]) -> ModelShape:
    """The shape by its name, or from printed widths."""
    if printed.get("d_model"):
        config = {"model_type": "mpt", "d_model": printed["d_model"], "n_layers": printed["n_layers"], "n_heads": printed["n_heads"], "vocab_size": printed["vocab"]}
        return from_config(config, str(printed["model"]))
    return shape(str(printed.get("model") or printed.get("actor")))


ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
TORCHTUNE_LINEAR = ("q", "v", "o", "gate", "up", "down")


def levers_of(printed: Mapping[str, Any], software: Engine) -> Levers:
    """Levers from the words that sources use."""
    words = f"{printed.get('tuning', '')} {printed.get('details', '')} {printed.get('quant', '')} {printed.get('cumulative_technique', '')} {printed.get('optimizer', '')}".lower()
    technique = str(printed.get("cumulative_technique", ""))
    if "batch_size" not in printed and "micro_batch" not in printed and printed.get("stage") != "pretrain" and "recipe default" not in str(printed.get("batch", "")):
        raise CostError(f"its batch is {printed.get('batch', 'not stated')}: memory and time depend on it")
    micro = int(printed.get("micro_batch") or printed.get("batch_size") or 2)
    gpus = int(printed.get("gpus", 1))
    accumulation = int(printed.get("grad_accum") or max(1, int(printed.get("global_batch", micro * gpus)) // (micro * gpus)))
    ladder = _ladder(technique)
    changes: dict[str, Any] = {
        "micro_batch": micro,
        "accumulation": accumulation,
        "dtype": str(printed.get("dtype", "bf16")).split("-")[0].split(" ")[0],
        "tuning": _tuning(words),
        "quantisation": _quantisation(words),
        "optimizer": _optimizer(words),
        "checkpointing": "full" if printed.get("grad_checkpointing") else "none",
        "attention": "sdpa" if "torchtune" in software.name or printed.get("flash_attention", "litgpt" in software.name) else "eager",
    }
    if changes["tuning"] == "lora":
        rank = re.search(r"r(\d+)\b", words)
        changes["lora_rank"] = int(printed.get("lora_rank") or (rank.group(1) if rank else 8))
        changes["lora_modules"] = _modules(words, printed, software)
        changes["lora_dropout"] = software.name == "litgpt"  # its default is 0.05
    if "torchtune" in software.name:
        if changes["tuning"] == "full" and gpus == 1 and not technique:
            # on one device torchtune's full recipe pages its optimizer and applies gradients in the backward pass
            changes |= {"optimizer": "paged_adamw8bit", "optimizer_in_backward": True}
        if gpus > 1:
            changes |= {"parallel": "fsdp", "offload_weights": "cpu offload" in words, "offload_optimizer": "cpu offload" in words}
    if software.name == "litgpt" and gpus > 1:
        changes["parallel"] = "fsdp"
    if software.name in ("llm-foundry", "megatron"):
        changes |= {"parallel": "fsdp", "weights_fp32": True, "attention": "flash"}
    if software.name == "megatron":
        changes |= {"micro_batch": 1, "accumulation": 1}  # 4M tokens a batch over 2048 devices: one sequence of 2048 each
    return Levers(**(changes | ladder))


def _tuning(words: str) -> Any:
    if "lora" in words:
        return "lora"
    return "adapter_v2" if "adapter_v2" in words else "adapter" if "adapter" in words else "full"


def _quantisation(words: str) -> str | None:
    if "nf4-dq" in words:
        return "nf4-dq"
    if "bnb.nf4" in words:
        return "nf4"
    if "qlora" in words:
        return "nf4-dq"  # double quantisation is part of QLoRA (arXiv 2305.14314)
    return "int8" if "int8" in words.split() else "int4" if "int4" in words.split() else None


def _optimizer(words: str) -> Any:
    if "paged" in words:
        return "paged_adamw8bit" if "8bit" in words else "paged_adamw"
    return "adamw8bit" if "8bit" in words else "adamw"


def _modules(words: str, printed: Mapping[str, Any], software: Engine) -> tuple[str, ...]:
    modules = str(printed.get("lora_modules", ""))
    if modules:
        return ALL_LINEAR if "all" in modules else tuple(re.findall(r"\b[qkvo]\b", modules))
    if "q,v,o + mlp" in words or "torchtune" in software.name:
        return TORCHTUNE_LINEAR
    return ("q", "v")


def _ladder(technique: str) -> dict[str, Any]:
    """Each row of a cumulative table has what the rows above it have; the LoRA rows stand on the whole ladder but the full-tuning rungs."""
    if not technique:
        return {}
    rungs = ["baseline", "+packed", "+compile", "+chunked_ce", "+act_ckpt", "+opt_in_bwd", "+act_offload", "+8bit_adamw", "lora", "qlora"]
    height = rungs.index(technique) if technique in rungs else 0
    found: dict[str, Any] = {"loss": "chunked" if height >= 3 else "whole", "packing": height >= 1}
    if height >= 4:
        found["checkpointing"] = "full"
    if height >= 6:
        found["offload_activations"] = True
    if technique in ("lora", "qlora"):
        return found | {"tuning": "lora", "lora_modules": ALL_LINEAR, "quantisation": "nf4-dq" if technique == "qlora" else None, "optimizer": "adamw"}
    return found | {"optimizer_in_backward": height >= 5, "optimizer": "adamw8bit" if height >= 7 else "adamw"}


def lengths(printed: Mapping[str, Any], levers: Levers) -> tuple[int, float]:
    """(longest, mean) tokens of a sequence. A batch is padded to its longest row: of rows with exponential lengths, the harmonic number."""
    alpaca = str(printed.get("dataset", "")).lower() == "alpaca"
    padded = ALPACA_MEAN_TOKENS * sum(1 / k for k in range(1, levers.micro_batch + 1))
    if printed.get("longest_seq"):
        longest = int(printed["longest_seq"])
        return longest, min(float(longest), padded if alpaca else float(longest))
    if printed.get("cumulative_technique") == "baseline":
        return 350, padded  # not packed: Alpaca rows; the longest of the few batches that the peak was read over
    digits = re.search(r"\d+", str(printed.get("seq_len", "")))
    if digits:
        return int(digits.group()), float(digits.group())
    if "recipe default" in str(printed.get("batch", "")) or printed.get("lora_modules"):
        return 512, padded  # torchtune's tutorial and first table: Alpaca rows, not packed, longest row cut near 512
    raise CostError("its sequence length is not stated: memory and time depend on it")


def _inference(printed: Mapping[str, Any], model: ModelShape, software: Engine, dated: bool) -> Setting:
    """Batch-1 decoding: a short prompt and some two hundred new tokens (gpt-fast's and litgpt's defaults), 50 for litgpt."""
    _ = dated
    words = str(printed.get("quant", "")).lower()
    new = 50 if software.name == "litgpt" else 200
    parallel = int(printed.get("tensor_parallel", 1))
    levers = Levers(
        tuning="frozen", quantisation=_quantisation(words), tensor_parallel=parallel, micro_batch=int(printed.get("batch_size", 1)), attention="sdpa"
    )
    work = Workload(max_tokens=new + 10, mean_tokens=new + 10, steps=1, prompt_tokens=10, response_tokens=new, mean_response_tokens=new)
    return Setting("serve", model, levers, work, hardware(str(printed["gpu"])), software, max(parallel, int(printed.get("gpus", 1))))


def _deepspeed_chat(printed: Mapping[str, Any], software: Engine) -> Setting:
    """Step 3: actor and reference of one size, reward and critic of another; the largest power of two that fits is the batch."""
    device, gpus = hardware(str(printed["gpu"])), int(printed["gpus"])
    actor, critic = shape(str(printed["actor"])), shape(str(printed["critic_model"]))
    prompt, new = int(printed["prompt_len"]), int(printed["gen_len"])
    levers = Levers(dtype="fp16", weights_fp32=False, tuning="lora", lora_rank=128, lora_modules=ALL_LINEAR, checkpointing="full", parallel="zero3" if gpus > 1 else "ddp", attention="eager")
    best: Setting | None = None
    for each in (1, 2, 4, 8, 16, 32, 64, 128):
        total = each * gpus
        if total > int(printed["max_global_batch_pairs"]):
            break
        loop = Rlhf(ref=True, reward=critic, value=critic, batch=total, rollout_batch=each, ppo_epochs=1, mini_batches=1)
        work = Workload(prompt + new, prompt + new, float(printed["samples"]) / total, prompt, new, new)
        candidate = Setting("ppo", actor, replace(levers, micro_batch=each), work, device, software, gpus, rlhf=loop)
        if best is None or peak(moments(candidate)).total < device.usable_bytes:
            best = candidate
    if best is None:
        raise CostError("not even one sequence a device is within the global batch")
    return best


# ---------------------------------------------------------------- errors


def weighted_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of |error| in which every source weighs the same, however many rows it has."""
    pairs = list(errors)
    rows = {source: sum(1 for s, _ in pairs if s == source) for source, _ in pairs}
    ordered = sorted((abs(error), 1 / rows[source]) for source, error in pairs)
    total, passed = sum(weight for _, weight in ordered), 0.0
    for error, weight in ordered:
        passed += weight
        if passed >= fraction * total:
            return error
    return float("nan")


def compare(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Case], list[tuple[str, str]]]:
    """(comparisons, refused rows with their reasons) of a whole table."""
    found: list[Case] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            found.extend(cases(row))
        except CostError as error:
            refused.append((row["id"], str(error)))
    return found, refused


def summary(found: list[Case], quantity: str, tier: str = "A") -> dict[str, float]:
    """Median and 90th percentile of |error| over the rows of one tier, sources weighing the same; and the plain median."""
    errors = [(case.source, case.error) for case in found if case.quantity == quantity and case.tier == tier]
    return {
        "rows": float(len(errors)),
        "median": weighted_quantile(errors, 0.5),
        "p90": weighted_quantile(errors, 0.9),
        "plain_median": median(abs(error) for _, error in errors) if errors else float("nan"),
    }
