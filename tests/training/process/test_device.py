"""Which device a process computes on."""

import torch

from training.process.device import device


def test_attention_does_without_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    device()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
