"""The device that a process computes on: an accelerator if there is one, else the CPU."""

import torch


def device() -> torch.device:
    """The device for models of this process.

    Attention does not use cuDNN, which makes a plan of its own for every shape, 0.1 s each on an H100, and nearly
    every micro-batch and every step of a rollout has another shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def device_name(device: torch.device) -> str:
    """`cpu`, or the name of the accelerator."""
    named = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)
    return "cpu" if device.type == "cpu" else str(named())
