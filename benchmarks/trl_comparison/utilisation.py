"""How well the update phase uses the machine: useful FLOP/s over the matmul rate of the same shapes.

Shapes: N tokens.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def linear_shapes(shape: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(in, out) of the matrices of one Llama layer, from the fields of config.json."""
    width, mlp = shape["hidden_size"], shape["intermediate_size"]
    kv_width = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return [
        (width, width),
        (width, kv_width),
        (width, kv_width),
        (width, width),
        (width, mlp),
        (width, mlp),
        (mlp, width),
    ]


def forward_flops(
    shape: Mapping[str, Any], prompt_lengths: Sequence[int], response_lengths: Sequence[int], logits: bool
) -> int:
    """FLOPs of one forward pass over real tokens, a multiply and an add counted as two.

    2 * weights per token for the layers; 2 * width * n * (n + 1) per layer for causal attention over n tokens (scores
    and their product with the values); with `logits`, 2 * width * vocabulary per response token. Norms, softmax and
    embedding are left out.
    Source: Kaplan et al. 2020 (arXiv:2001.08361), table 1, with causal instead of full attention.
    """
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    weights = sum(rows * columns for rows, columns in linear_shapes(shape))
    lengths = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    flops = layers * sum(2 * weights * n + 2 * width * n * (n + 1) for n in lengths)
    return flops + (2 * width * shape["vocab_size"] * sum(response_lengths) if logits else 0)


def update_flops(
    shape: Mapping[str, Any],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    ppo_epochs: int,
    own_value_trunk: bool,
    lora: bool,
) -> int:
    """Useful FLOPs of an update: forward and backward of policy and value model over every episode, ppo_epochs times.

    Backward is twice the forward; under LoRA once, as frozen weights have no gradient (the adapters' own FLOPs are
    left out). Recomputed logits or activations are not useful.
    """
    passes = 2 if lora else 3
    policy = forward_flops(shape, prompt_lengths, response_lengths, logits=True)
    value = forward_flops(shape, prompt_lengths, response_lengths, logits=False) if own_value_trunk else 0
    return ppo_epochs * passes * (policy + value)


def matmul_flops_per_second(
    shape: Mapping[str, Any], tokens: int, dtype: torch.dtype, device: str, seconds: float = 2.0
) -> float:
    """Rate over the matrices of a layer and the logits with `tokens` rows: forward, gradient of the input, gradient of
    the weight.
    """
    sizes = [*linear_shapes(shape), (shape["hidden_size"], shape["vocab_size"])]
    operands = [
        (torch.randn(tokens, rows, dtype=dtype, device=device), torch.randn(rows, columns, dtype=dtype, device=device))
        for rows, columns in sizes
    ]
    flops_each = sum(3 * 2 * tokens * rows * columns for rows, columns in sizes)

    def once() -> None:
        for x, weight in operands:
            y = x @ weight
            y @ weight.T
            x.T @ y
        if device != "cpu":
            torch.accelerator.synchronize()

    once()
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        once()
        rounds += 1
    return rounds * flops_each / (time.perf_counter() - began)
