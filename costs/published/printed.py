"""The settings that publications print, in their own words -> Settings.

A row of a truth table has `setting` (engine, model, tuning, quant, batch_size or micro_batch,
seq_len, gpu, gpus ...) and `source.title`. What a source leaves open is filled with the assumption
named here; a row that leaves open too much is refused with the reason. `rlhf plan --setting FILE`
reads the same words from a YAML file.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import CostError
from costs.formulas.memory import peak
from costs.formulas.setting import Levers, Rlhf, Setting, Workload
from costs.planning.stages import moments
from costs.tables.catalogue import hardware, shape
from costs.tables.engines import Engine, engine
from costs.tables.shapes import ModelShape, from_config

ALPACA_MEAN_TOKENS = 135
"""Mean length of the Alpaca rows with their template, in tokens: 52,002 rows of about 570
characters.
"""
CLUSTER_GPUS = 2048
"""LLaMA was trained on 2048 devices (arXiv 2302.13971 section 2.4)."""


SOFTWARE = (
    ("litgpt", "litgpt"),
    ("foundry", "llm-foundry"),
    ("composer", "llm-foundry"),
    ("gpt-fast", "gpt-fast"),
    ("deepspeed-chat", "deepspeed-chat"),
    ("hf trainer", "transformers-2022"),
    ("megatron", "megatron"),
    ("nanogpt", "nanogpt"),
    ("unsloth", "unsloth"),
    ("vllm", "vllm"),
    ("trl", "transformers"),
    ("peft", "transformers"),
    ("axolotl", "transformers"),
    ("factory", "transformers"),
    ("transformers", "transformers"),
)
"""(word in the printed engine, ours), the first that is found."""
STAGES = {"pretrain": "pretrain", "dpo": "dpo", "reward": "reward"}
"""Printed training stages that are not plain SFT."""
DTYPES = (
    ("bf16", "bf16"),
    ("bfloat16", "bf16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("16", "fp16"),
    ("tf32", "tf32"),
    ("32", "fp32"),
)


def setting_of(row: Mapping[str, Any]) -> Setting:
    """The Setting of a row. Raises CostError where too much is left open."""
    printed = row["setting"]
    device = hardware(str(printed["gpu"]))
    software = engine_of(row)
    if printed.get("stage") == "ppo_step3_rlhf":
        return _deepspeed_chat(printed, software)
    model = model_of(printed)
    if printed.get("stage") == "inference":
        return _inference(printed, model, software)
    levers = levers_of(printed, software)
    tokens, mean = lengths(printed, levers)
    gpus = int(printed.get("gpus", CLUSTER_GPUS if printed.get("stage") == "pretrain" else 1))
    steps = 1.0
    if printed.get("tokens"):
        steps = float(printed["tokens"]) / (levers.micro_batch * levers.accumulation * gpus * mean)
    stage = STAGES.get(str(printed.get("stage")), "sft")
    return Setting(stage, model, levers, Workload(tokens, mean, steps), device, software, gpus)


def engine_of(row: Mapping[str, Any]) -> Engine:
    """The engine's facts by its printed name and the version in the source's title."""
    name, title, printed = (
        str(row["setting"].get("engine", "")).lower(),
        row["source"]["title"].lower(),
        row["setting"],
    )
    technique = str(printed.get("cumulative_technique", ""))
    compiled = (
        bool(printed.get("compile"))
        or "torch.compile" in str(printed.get("tuning", ""))
        or technique not in ("", "baseline", "+packed")
    )
    if "torchtune" in name:
        old = re.search(r"(apr|may|jun|jul|aug|sep) 2024|a9180b537|ca0a6de40", title) is not None
        return engine("torchtune-2024" if old else "torchtune", compiled)
    ours = next((ours for key, ours in SOFTWARE if key in name), None)
    if ours is not None:
        return engine(ours, compiled or None)
    return engine("megatron" if printed.get("stage") == "pretrain" else "transformers-2022")


def model_of(printed: Mapping[str, Any]) -> ModelShape:
    """The shape by its name, or from printed widths."""
    if printed.get("d_model"):
        config = {
            "model_type": "mpt",
            "d_model": printed["d_model"],
            "n_layers": printed["n_layers"],
            "n_heads": printed["n_heads"],
            "vocab_size": printed["vocab"],
        }
        return from_config(config, str(printed["model"]))
    return shape(str(printed.get("model") or printed.get("actor")))


ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
TORCHTUNE_LINEAR = ("q", "v", "o", "gate", "up", "down")


def levers_of(printed: Mapping[str, Any], software: Engine) -> Levers:
    """Levers from the words that sources use."""
    words = " ".join(
        str(printed.get(key, ""))
        for key in ("tuning", "details", "quant", "cumulative_technique", "optimizer")
    ).lower()
    technique = str(printed.get("cumulative_technique", ""))
    if (
        "batch_size" not in printed
        and "micro_batch" not in printed
        and printed.get("stage") != "pretrain"
        and "recipe default" not in str(printed.get("batch", ""))
    ):
        raise CostError(
            f"its batch is {printed.get('batch', 'not stated')}: memory and time depend on it"
        )
    micro = int(printed.get("micro_batch") or printed.get("batch_size") or 2)
    gpus = int(printed.get("gpus", 1))
    accumulation = int(
        printed.get("grad_accum")
        or max(1, int(printed.get("global_batch", micro * gpus)) // (micro * gpus))
    )
    ladder = _ladder(technique)
    changes: dict[str, Any] = {
        "micro_batch": micro,
        "accumulation": accumulation,
        "dtype": next(
            (ours for word, ours in DTYPES if word in str(printed.get("dtype", "bf16"))), "bf16"
        ),
        "weights_fp32": any(word in str(printed.get("dtype", "")) for word in ("mixed", "amp")),
        "tuning": _tuning(words),
        "quantisation": _quantisation(words),
        "optimizer": _optimizer(words),
        "checkpointing": "full" if printed.get("grad_checkpointing") else "none",
        "attention": "sdpa"
        if "torchtune" in software.name or printed.get("flash_attention", "litgpt" in software.name)
        else "eager",
    }
    if changes["tuning"] == "lora":
        rank = re.search(r"r(\d+)\b", words)
        changes["lora_rank"] = int(printed.get("lora_rank") or (rank.group(1) if rank else 8))
        changes["lora_modules"] = _modules(words, printed, software)
        changes["lora_dropout"] = software.name == "litgpt"  # its default is 0.05
    if "torchtune" in software.name:
        if changes["tuning"] == "full" and gpus == 1 and not technique:
            # on one device torchtune's full recipe pages its optimizer and applies gradients in the
            # backward pass
            changes |= {"optimizer_in_backward": True} | (
                {} if "paged" in words else {"optimizer": "paged_adamw8bit"}
            )
        if gpus > 1:
            changes |= {
                "parallel": "fsdp",
                "offload_weights": "cpu offload" in words,
                "offload_optimizer": "cpu offload" in words,
            }
    if software.name == "litgpt" and gpus > 1:
        changes["parallel"] = "fsdp"
    if software.name in ("llm-foundry", "megatron"):
        changes |= {"parallel": "fsdp", "weights_fp32": True, "attention": "flash"}
    if software.name == "megatron":
        # 4M tokens a batch over 2048 devices: one sequence of 2048 each
        changes |= {"micro_batch": 1, "accumulation": 1}
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
    """Each row of a cumulative table has what the rows above it have; the LoRA rows stand on the
    whole ladder but the full-tuning rungs.
    """
    if not technique:
        return {}
    rungs = [
        "baseline",
        "+packed",
        "+compile",
        "+chunked_ce",
        "+act_ckpt",
        "+opt_in_bwd",
        "+act_offload",
        "+8bit_adamw",
        "lora",
        "qlora",
    ]
    height = rungs.index(technique) if technique in rungs else 0
    found: dict[str, Any] = {"loss": "chunked" if height >= 3 else "whole"}
    if height >= 4:
        found["checkpointing"] = "full"
    if height >= 6:
        found["offload_activations"] = True
    if technique in ("lora", "qlora"):
        return found | {
            "tuning": "lora",
            "lora_modules": ALL_LINEAR,
            "quantisation": "nf4-dq" if technique == "qlora" else None,
            "optimizer": "adamw",
        }
    return found | {
        "optimizer_in_backward": height >= 5,
        "optimizer": "adamw8bit" if height >= 7 else "adamw",
    }


def lengths(printed: Mapping[str, Any], levers: Levers) -> tuple[int, float]:
    """(longest, mean) tokens of a sequence. A batch is padded to its longest row: of rows with
    exponential lengths, the harmonic number.
    """
    alpaca = str(printed.get("dataset", "")).lower() == "alpaca"
    padded = ALPACA_MEAN_TOKENS * sum(1 / k for k in range(1, levers.micro_batch + 1))
    if printed.get("longest_seq"):
        longest = int(printed["longest_seq"])
        return longest, min(float(longest), padded if alpaca else float(longest))
    if printed.get("cumulative_technique") == "baseline":
        # not packed: Alpaca rows; the longest of the few batches that the peak was read over
        return (350, padded)
    digits = re.search(r"\d+", str(printed.get("seq_len", "")))
    if digits:
        return int(digits.group()), float(digits.group())
    if "recipe default" in str(printed.get("batch", "")) or printed.get("lora_modules"):
        # torchtune's tutorial and first table: Alpaca rows, not packed, longest row cut near 512
        return (512, padded)
    raise CostError("its sequence length is not stated: memory and time depend on it")


def _inference(printed: Mapping[str, Any], model: ModelShape, software: Engine) -> Setting:
    """Batch-1 decoding: a short prompt and some two hundred new tokens (gpt-fast's and litgpt's
    defaults), 50 for litgpt.
    """
    words = str(printed.get("quant", "")).lower()
    new = 50 if software.name == "litgpt" else 200
    parallel = int(printed.get("tensor_parallel", 1))
    levers = Levers(
        tuning="frozen",
        quantisation=_quantisation(words),
        tensor_parallel=parallel,
        micro_batch=int(printed.get("batch_size", 1)),
        attention="sdpa",
    )
    work = Workload(
        max_tokens=new + 10,
        mean_tokens=new + 10,
        steps=1,
        prompt_tokens=10,
        response_tokens=new,
        mean_response_tokens=new,
    )
    return Setting(
        "serve",
        model,
        levers,
        work,
        hardware(str(printed["gpu"])),
        software,
        max(parallel, int(printed.get("gpus", 1))),
    )


def _deepspeed_chat(printed: Mapping[str, Any], software: Engine) -> Setting:
    """Step 3: actor and reference of one size, reward and critic of another; the largest power of
    two that fits is the batch.
    """
    device, gpus = hardware(str(printed["gpu"])), int(printed["gpus"])
    actor, critic = shape(str(printed["actor"])), shape(str(printed["critic_model"]))
    prompt, new = int(printed["prompt_len"]), int(printed["gen_len"])
    levers = Levers(
        dtype="fp16",
        weights_fp32=False,
        tuning="lora",
        lora_rank=128,
        lora_modules=ALL_LINEAR,
        checkpointing="full",
        parallel="zero3" if gpus > 1 else "ddp",
        attention="eager",
    )
    best: Setting | None = None
    for each in (1, 2, 4, 8, 16, 32, 64, 128):
        total = each * gpus
        if total > int(printed["max_global_batch_pairs"]):
            break
        loop = Rlhf(
            ref=True,
            reward=critic,
            value=critic,
            batch=total,
            rollout_batch=each,
            ppo_epochs=1,
            mini_batches=1,
        )
        work = Workload(
            prompt + new, prompt + new, float(printed["samples"]) / total, prompt, new, new
        )
        candidate = Setting(
            "ppo", actor, replace(levers, micro_batch=each), work, device, software, gpus, rlhf=loop
        )
        if best is None or peak(moments(candidate)).total < device.usable_bytes:
            best = candidate
    if best is None:
        raise CostError("not even one sequence a device is within the global batch")
    return best
