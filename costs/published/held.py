"""How a published setting holds and trains its model, as levers of the formulas."""

from dataclasses import replace
from typing import Any

from costs.formulas.setting import Levers
from costs.published.phrases import ALL_LINEAR
from costs.published.printed import Printed
from costs.published.words import Refused
from costs.tables.catalogue import Hardware
from costs.tables.engines import Engine
from costs.tables.rates import EFFICIENCY

FP8_DEVICES = ("h100", "h200", "h20", "h800", "gh200", "b200", "gb200", "l4", "l40", "l20",
               "a6000-ada", "rtx40", "rtx50", "mi300")  # fmt: skip
FP8_GAIN = 0.75
"""Of the ideal doubling, what scaling factors, casts and transposes leave to a matrix product in
fp8."""


def levers_of(said: Printed, software: Engine, gpus: int, notes: list[str]) -> Levers:
    """The levers of a setting that trains; what is filled in is added to `notes`. Raises Refused
    where the tuning is not stated.
    """
    tuning = said.tuning
    if tuning is None:
        if said.lora_rank or said.lora_modules:
            tuning = "lora"
        elif said.stage in ("pretrain", "reward", "dpo"):
            tuning = "full"
        else:
            raise Refused(["tuning is not stated: full, lora or qlora decides memory and time"])
    changes: dict[str, Any] = {
        "tuning": tuning,
        "dtype": said.dtype or "bf16",
        "quantisation": quantisation(said, tuning),
        "optimizer": said.optimizer or "adamw",
        "optimizer_in_backward": bool(said.optimizer_in_backward),
        "checkpointing": _checkpointing(said, software, notes),
        "attention": _attention(said, software),
        "loss": said.loss,
        "offload_optimizer": said.offload_optimizer,
        "offload_weights": said.offload_weights and said.zero in (3, None),
        "offload_activations": said.offload_activations,
        "tensor_parallel": said.tensor_parallel,
        "parallel": _parallel(said, software, gpus),
    }
    if said.dtype is None:
        notes.append("dtype not stated: bf16 assumed")
    if said.optimizer is None and not said.rungs:
        notes.append("optimizer not stated: AdamW assumed")
    changes |= _precision(said, software, tuning)
    if changes["quantisation"] and tuning != "full" and software.widens_unquantised:
        changes["wide_unquantised"] = True
    if tuning == "lora":
        if said.lora_rank is None:
            notes.append("lora_rank not stated: 8 assumed")
        changes["lora_rank"] = said.lora_rank or 8
        changes["lora_modules"] = said.lora_modules or _default_modules(software, said, notes)
        changes["lora_dropout"] = (
            said.lora_dropout if said.lora_dropout is not None else software.name == "litgpt"
        )
    return Levers(**(changes | _ladder(said)))


def quantisation(said: Printed, tuning: str) -> str | None:
    """The storage of frozen weights, in the words of the formulas."""
    names = {"int4": "nf4", "bnb-int8": "int8"} if tuning == "lora" else {
        "bnb-int8": "int8", "gptq": "int4", "awq": "int4", "gptq-int8": "int8"}  # fmt: skip
    quant = names.get(str(said.quant), said.quant)
    if tuning == "full" and quant is not None:
        raise Refused([f"quant={said.quant} contradicts full fine-tuning: quantised weights are "
                       "frozen"])  # fmt: skip
    return quant


def _checkpointing(said: Printed, software: Engine, notes: list[str]) -> str:
    if said.checkpointing is not None:
        return said.checkpointing
    if software.name in ("openrlhf", "deepspeed-chat") and said.stage == "ppo" and (
        said.zero == 3
    ):  # fmt: skip
        notes.append("grad_checkpointing not stated: full, as in its scripts")
        return "full"
    if not said.rungs:
        notes.append("grad_checkpointing not stated: none assumed")
    return "none"


ON_TRANSFORMERS = ("transformers", "ms-swift", "transformers-2022", "deepspeed-chat")
WITHOUT_SDPA = ("opt", "bloom", "bert", "gpt2", "mpt")
"""Families whose attention Transformers computed operation by operation until late in 2024; others
do so before December 2023.
"""


def _attention(said: Printed, software: Engine) -> str:
    if said.attention is not None:
        return said.attention
    if software.name in ON_TRANSFORMERS and (
        said.model.family in WITHOUT_SDPA or (said.month or "9") < "2023-12"
    ):
        return "eager"
    # what each software takes by itself
    if software.name in ("torchtune", "torchtune-2024", "litgpt", "torchtitan", "fsdp-qlora"):
        return "sdpa"
    if software.name in ("llm-foundry", "megatron", "unsloth", "openrlhf", "verl", "nanogpt"):
        return "flash"
    return "eager" if software.name in ("transformers-2022", "deepspeed-chat") else "sdpa"


def _parallel(said: Printed, software: Engine, gpus: int) -> str:
    if said.zero is not None:
        if said.fsdp and said.zero == 3:
            return "fsdp"
        return {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}[said.zero]
    if gpus > 1 and software.name in ("torchtune", "torchtune-2024", "litgpt", "llm-foundry",
                                      "torchtitan", "fsdp-qlora"):  # fmt: skip
        return "fsdp"
    if software.name in ("megatron", "gpt-neox") and gpus > 1:
        return "zero1"  # its distributed optimizer
    return "ddp"


def _precision(said: Printed, software: Engine, tuning: str) -> dict[str, Any]:
    """How trained weights are held beside the compute type."""
    if tuning != "full":
        return {}
    sharded = (said.zero or 0) > 0 and not said.fsdp
    if software.name in ("llm-foundry", "torchtitan") or (said.mixed and not sharded):
        return {"weights_fp32": said.mixed is not False}
    if said.dtype == "fp32":
        return {}
    if said.master or sharded or software.name in (
        "megatron", "gpt-neox", "deepspeed-chat", "openrlhf", "verl",
    ):  # fmt: skip
        return {"master_fp32": True}
    if said.zero == 0 and said.dtype == "fp16":
        return {"master_fp32": True}  # fp16 does not train without fp32 weights beside it
    return {}


def _default_modules(software: Engine, said: Printed, notes: list[str]) -> tuple[str, ...]:
    chosen = {
        "torchtune": ("q", "v", "o", "gate", "up", "down"),
        "torchtune-2024": ("q", "v", "o", "gate", "up", "down"),
        "fsdp-qlora": ALL_LINEAR,
        "unsloth": ALL_LINEAR,
        "megatron": ALL_LINEAR,
    }.get(software.name)
    if chosen is None:
        chosen = ALL_LINEAR if said.quant else ("q", "v")
        notes.append(f"lora_modules not stated: {', '.join(chosen)} assumed")
    return chosen


def _ladder(said: Printed) -> dict[str, Any]:
    """Each row of a cumulative table has what the rows above it have; its LoRA rows stand on all
    but the rungs of full tuning.
    """
    if not said.rungs:
        return {}
    height = len(said.rungs) - 1
    found: dict[str, Any] = {"loss": "chunked" if height >= 3 else "whole"}
    if height >= 4:
        found["checkpointing"] = "full"
    if height >= 6:
        found["offload_activations"] = True
    if said.rungs[-1] in ("lora", "qlora"):
        return found | {
            "tuning": "lora",
            "lora_rank": said.lora_rank or 8,
            "lora_modules": ALL_LINEAR,
            "quantisation": "nf4-dq" if said.rungs[-1] == "qlora" else None,
        }
    return found | {
        "optimizer_in_backward": height >= 5,
        "optimizer": "adamw8bit" if height >= 7 else "adamw",
    }


def in_fp8(said: Printed, device: Hardware) -> tuple[Hardware, Any]:
    """A device whose 16-bit products run in fp8; attention stays in 16 bit."""
    if not said.fp8:
        return device, EFFICIENCY
    peaks = dict(device.peak_flops_per_second)
    gain = 1 + FP8_GAIN * (peaks.get("int8", peaks["bf16"]) / peaks["bf16"] - 1)
    faster = tuple(
        (name, rate * gain if name in ("bf16", "fp16") else rate) for name, rate in peaks.items()
    )
    return (
        replace(device, peak_flops_per_second=faster),
        replace(EFFICIENCY, attention=EFFICIENCY.attention / gain),
    )
