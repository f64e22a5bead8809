"""A stage whose second process cannot allocate more in the middle of a forward pass.

`python -m tests.training.support.short_of_memory STAGE TOKENS`

The allocation that fails is a real one, in the first layer of a pass with gradient over more than so many tokens,
padding included.
"""

import os
import sys
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from training.process.run import entry, run_stage


def fail_above(most_tokens: int) -> None:
    forward = LlamaDecoderLayer.forward

    def short(self: Any, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        if torch.is_grad_enabled() and self.self_attn.layer_idx == 0 and tokens > most_tokens:
            torch.empty(2**60, dtype=torch.uint8)
        return forward(self, hidden_states, *arguments, **named)

    LlamaDecoderLayer.forward = short


def main(stage: str, most_tokens: int) -> int:
    if os.environ["RANK"] == "1":
        fail_above(most_tokens)
    return run_stage(stage, *entry(stage))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
