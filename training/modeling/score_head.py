"""Scalar heads of reward and value models, in fp32 whatever the type of the model.

A bf16 number has 8 bits: scores of about 4 would be multiples of 1/64, and close responses would tie.

Shapes: D model width.
"""

import math

import torch
from torch import Tensor, nn


class ScoreHead(nn.Linear):
    """[..., D] -> [..., 1] in fp32; autocast does not apply to it."""

    def __init__(self, width: int, bias: bool, device: torch.device | None = None) -> None:
        super().__init__(width, 1, bias=bias, device=device, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def new_head(width: int, seed: int, device: torch.device) -> ScoreHead:
    """A head without bias, drawn from `seed`."""
    head = ScoreHead(width, bias=False, device=device)
    init_head(head, seed)
    return head


def init_head(head: nn.Linear, seed: int) -> None:
    """Draw a scalar head's weights with std 1/sqrt(d + 1); no bias."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(weights)
        if head.bias is not None:
            head.bias.zero_()


def head_of(weight_1D: Tensor, device: torch.device) -> ScoreHead:
    """A head with these weights, without bias."""
    head = ScoreHead(weight_1D.shape[1], bias=False, device=device)
    with torch.no_grad():
        head.weight.copy_(weight_1D)
    return head


def normalised_head(head: nn.Linear, mean: float, std: float) -> ScoreHead:
    """A head with bias that outputs (w h - mean) / std where `head` outputs w h.

    For a value model that starts as the reward model: its returns are sums of normalised scores.
    """
    folded = ScoreHead(head.in_features, bias=True, device=head.weight.device)
    with torch.no_grad():
        folded.weight.copy_(head.weight / std)
        folded.bias.fill_(-mean / std)
    return folded
