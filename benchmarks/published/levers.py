"""How a published run holds and trains its model, as levers of the formulas."""

from dataclasses import replace
from typing import Any

from benchmarks.published.engines import ALL_LINEAR, Software, defaults
from benchmarks.published.row import Refused, Run
from costs.formulas.setting import Levers
from costs.tables.catalogue import Hardware
from costs.tables.rates import Efficiency

FP8_DEVICES = ("h100", "h200", "h20", "h800", "gh200", "b200", "gb200", "l4", "l40", "l20",
               "a6000-ada", "rtx40", "rtx50", "mi300")  # fmt: skip
FP8_GAIN = 0.75
"""Of the ideal doubling, what scaling factors, casts and transposes leave to a matrix product in fp8."""
WITHOUT_SDPA = ("opt", "bloom", "bert", "gpt2", "mpt")
"""Families whose attention Transformers computed operation by operation until late in 2024; others do so before
December 2023.
"""
ON_TRANSFORMERS = ("transformers", "ms-swift", "transformers-2022", "deepspeed-chat")


def levers_of(run: Run, software: Software, gpus: int, notes: list[str]) -> Levers:
    """The levers of a run that trains; assumptions are added to `notes`. Raises Refused where the tuning is not
    stated.
    """
    usual = defaults(software)
    tuning = run.tuning or ("lora" if run.lora_rank or run.lora_modules else None)
    if tuning is None:
        if run.stage not in ("pretrain", "reward", "dpo", "ppo", "grpo", "rloo"):
            raise Refused("tuning is missing: full or lora decides memory and time.")
        tuning = "full"
    sharding = run.sharding or (usual.sharding if gpus > 1 else "ddp")
    changes: dict[str, Any] = {
        "tuning": tuning,
        "dtype": run.dtype or "bf16",
        "quantisation": run.quantisation,
        "optimizer": run.optimizer or "adamw",
        "checkpointing": _recomputation(run, software, notes),
        "attention": _attention(run, software),
        "loss": run.loss,
        "offload_optimizer": run.offload_optimizer,
        "offload_weights": run.offload_weights and sharding in ("zero3", "fsdp", "ddp"),
        "parallel": sharding,
        "wide_unquantised": bool(run.quantisation) and software.widens_unquantised,
    }
    for key in ("dtype", "optimizer"):
        if getattr(run, key) is None:
            notes.append(f"{key} is not stated: {changes[key]} assumed")
    if tuning == "lora":
        changes |= _adapter(run, software, notes)
    return Levers(**(changes | _weights(run, software, tuning)))


def _adapter(run: Run, software: Software, notes: list[str]) -> dict[str, Any]:
    usual = defaults(software)
    modules = run.lora_modules or usual.lora_modules
    if modules is None:
        modules = ALL_LINEAR if run.quantisation else ("q", "v")
        notes.append(f"lora_modules is not stated: {', '.join(modules)} assumed")
    if run.lora_rank is None:
        notes.append("lora_rank is not stated: 8 assumed")
    dropout = usual.lora_dropout if run.lora_dropout is None else run.lora_dropout
    return {"lora_rank": run.lora_rank or 8, "lora_modules": modules, "lora_dropout": dropout}


def _recomputation(run: Run, software: Software, notes: list[str]) -> str:
    if run.recomputation is not None:
        return run.recomputation
    scripts = software.name in ("openrlhf", "deepspeed-chat") and run.sharding == "zero3"
    result = "full" if scripts and run.stage == "ppo" else "none"
    notes.append(f"recomputation is not stated: {result} assumed")
    return result


def _attention(run: Run, software: Software) -> str:
    if run.attention is not None:
        return run.attention
    old = run.model.family in WITHOUT_SDPA or (run.released or "9") < "2023-12"
    if software.name in ON_TRANSFORMERS and old:
        return "eager"
    return defaults(software).attention


def _weights(run: Run, software: Software, tuning: str) -> dict[str, Any]:
    """How weights are held beside the compute type. DeepSpeed's shards have an fp32 copy, whatever holds the model;
    fp16 does not train without one.
    """
    held = run.trained_weights
    if tuning != "full":
        return {"weights_fp32": held == "fp32"}
    zero = run.sharding in ("zero1", "zero2", "zero3")
    if run.dtype == "fp32":
        return {}
    if held is None:
        held = "dtype_and_fp32" if zero or (
            run.sharding == "ddp" and run.dtype == "fp16"
        ) else defaults(software).trained_weights  # type: ignore[assignment] # fmt: skip
    if held == "fp32" and zero:
        held = "dtype_and_fp32"
    return {"weights_fp32": held == "fp32", "master_fp32": held == "dtype_and_fp32"}


def in_fp8(run: Run, device: Hardware, rates: Efficiency) -> tuple[Hardware, Efficiency]:
    """A device whose 16-bit products run in fp8; attention stays in 16 bits."""
    if not run.fp8:
        return device, rates
    if not device.name.startswith(FP8_DEVICES):
        raise Refused(f"fp8: {device.name} has no fp8 matrix products. Leave fp8 out.")
    peaks = dict(device.peak_flops_per_second)
    gain = 1 + FP8_GAIN * (peaks.get("int8", peaks["bf16"]) / peaks["bf16"] - 1)
    faster = tuple((name, rate * gain if name in ("bf16", "fp16") else rate) for name, rate in peaks.items())
    return (replace(device, peak_flops_per_second=faster), replace(rates, attention=rates.attention / gain))
