"""The optimizer of `sharding: zero1`, in a module of its own because the package it comes from
takes a second to import.
"""

import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    # by others in that package
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    from torch.distributed.optim import ZeroRedundancyOptimizer


class SharedOptimizer(ZeroRedundancyOptimizer):
    """Each process keeps the state of some of the parameters, and sends the others what they
    became.
    """

    def state_dict(self) -> dict[str, Any]:
        """As its parent's; before the first step there is nothing to collect, and Accelerate asks
        then.
        """
        return super().state_dict() if self.optim.state else torch.optim.Optimizer.state_dict(self)
