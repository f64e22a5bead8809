"""bitsandbytes: 4-bit storage of frozen weights, and an optimizer with 8-bit moments."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from config.errors import EnvironmentFault
from config.sections.levers import OptimizerName
from config.sections.model import Model

WHOLE_HEADS = ["lm_head", "embed_out", "score"]
"""Never quantised: log-probs and scores come from them, and they may be tied to the embedding."""
BLOCK_WEIGHTS = 64
"""Weights per scale."""


def optimizer(name: OptimizerName, groups: Iterable[dict[str, Any]], setting: str) -> torch.optim.Optimizer:
    """AdamW over parameter groups, without weight decay; `setting` is the parameter for error messages.

    Raises EnvironmentFault if bitsandbytes is missing.
    """
    if name == "adamw":
        return torch.optim.AdamW(list(groups), weight_decay=0.0, fused=True)
    require_bitsandbytes(f"{setting}={name}", f"{setting}: adamw")
    from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

    eight_bit: torch.optim.Optimizer = AdamW8bit(list(groups), weight_decay=0.0)
    return eight_bit


def quantisation(settings: Model, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Storage of frozen weights: 4-bit NormalFloat, multiplied in `dtype`; None stores them in `dtype`.

    Raises EnvironmentFault if bitsandbytes is missing. Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3,
    without double quantisation.
    """
    if settings.quantisation is None:
        return None
    require_bitsandbytes(f"model.quantisation={settings.quantisation}", "model.quantisation: null")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=False,
        llm_int8_skip_modules=WHOLE_HEADS,
    )


def check_storage(model: nn.Module, place: str | Path) -> None:
    """Make quantised weights give the same numbers on every machine.

    bitsandbytes 0.50 reads rows that are no multiple of a block wrongly on CPUs: refused. On a CPU with AVX512-BF16 it
    would pack the weights anew in the first forward without gradient and round their scales to bf16, so that the
    policy that samples is not the one that learns: turned off.

    Raises EnvironmentFault for a width that this machine reads wrongly.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        width = int(module.in_features)
        if width % BLOCK_WEIGHTS and next(module.parameters()).device.type == "cpu":
            raise EnvironmentFault(
                f"model.quantisation: {name} of {place} has rows of {width} weights, "
                f"and on a CPU bitsandbytes reads only multiples of {BLOCK_WEIGHTS} right. "
                "Use a GPU or a model of other widths, or set model.quantisation: null in params.yaml."
            )


def unmap_weight_files(model: nn.Module) -> None:
    """Copy weights that were not quantised out of the memory-mapped files: a single mapped weight keeps everything
    read from its file in memory.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def require_bitsandbytes(setting: str, instead: str) -> None:
    """Raise EnvironmentFault, naming the setting that needs it, unless bitsandbytes can be imported."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            f"{setting} needs the package bitsandbytes, which is not installed. "
            f"Run pip install -c constraints.txt bitsandbytes, or set {instead} in params.yaml."
        )
