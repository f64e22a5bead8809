"""Facts about training and generation software that affect memory and time: frameworks differ by 1.8x for the same
setting.

Each is an input of the formulas, read from the software's code or counted with saved-tensor hooks, never fitted to one
measurement.
"""

import math
from dataclasses import dataclass

from config.errors import CostError
from config.work import PREFILL_TOKENS


@dataclass(frozen=True)
class Engine:
    """One piece of software."""

    name: str
    loss: str = "dense"
    compiled: bool = False
    """Pointwise operations are fused (torch.compile): they keep 16-bit inputs only, and cost one pass over memory."""
    fused_norm: bool = False
    """The RMS norm is one kernel that keeps its input as it is."""
    packed_view: bool = False
    """Values stay a view of the packed projection, whose queries and keys are kept with it."""
    repeats_kv: bool = True
    """Keys and values are repeated for grouped queries before attention."""
    attention_copy: bool = False
    """The attention output is copied before the output projection."""
    fused_activation: bool = True
    """GELU is one kernel; Transformers writes the tanh form out for some families."""
    wide_norm: bool = False
    """The norm's weight multiplies the fp32 value, before it is cast back."""
    padded_lora: bool = False
    """LoRA on a packed projection keeps its update before it is padded with zeros."""
    quantised_keeps_input: bool = False
    """4-bit linear layers keep their input though their weight is frozen (bitsandbytes before 0.43)."""
    quantises_head: bool = False
    lora_input_bytes: float = 0.0
    """Bytes per feature of a further copy of a LoRA layer's input (PEFT casts it to the adapter's fp32)."""
    step_copies: float = 0.0
    """Parameter-sized temporaries of the optimizer step (foreach 1, fused 0)."""
    stages_whole_model: bool = False
    """Each device holds all weights before sharding."""
    context_bytes: float = 0.5 * 2**30
    """Device memory outside of the allocator: CUDA context and libraries, loaded lazily since CUDA 11.7."""
    op_seconds: float = 17e-6
    """Host time to launch one small operation from Python, modules and bookkeeping around it included: 45 of them are
    the 0.77 ms a layer that Transformers takes to decode.
    """
    layer_ops: float = 45.0
    """Operations that one layer launches forward."""
    lora_ops: float = 4.0
    """Further operations for each adapted matrix."""
    quantised_ops: float = 4.0
    """Further operations for each quantised matrix when decoding one token."""
    pointwise: float = 1.0
    """Traffic of norms, activations, rotary positions and residuals relative to eager Transformers; fused by a
    compiler 0.42.
    """
    overlap: float = 0.9
    """Share of collective communication hidden behind computation."""
    decode_layer_seconds: float = 0.0
    """Fixed time of one layer in one decoding step when compiled (launch from a CUDA graph, tails of small
    kernels).
    """
    graphed_decoding: bool = False
    """Decoding with undivided weights is replayed from a CUDA graph; anything else launches each operation."""
    packs: bool = False
    """Passes of alignment stages take rows without padding, filled up to a budget of tokens, and the last layer's
    feed-forward part runs at the tokens alone whose hidden states are read (training/modeling/packing.py,
    training/modeling/last_layer.py).
    """
    whole_logits: bool = True
    """In a loop, logits are computed at every token of prompt and response; ours at the responses' alone."""
    concatenates_cache: bool = False
    """The cache of keys and values grows by concatenation (Transformers' dynamic cache), and is repeated for grouped
    queries in every step.
    """
    whole_prefill: bool = False
    """The prefill makes the logits of the full prompt and an fp32 copy of them: Transformers before `logits_to_keep`
    (4.45).
    """
    prefill_tokens: float = math.inf
    """Tokens of prompts that go through the model at once; longer ones in chunks."""
    vendor_products: bool = False
    """Its matrix products are NVIDIA's own stack (Transformer Engine)."""


ENGINES = {
    engine.name: engine
    for engine in (
        # Ours: Transformers eager, losses and log-probs streamed over tokens, PEFT adapters, torch's fused AdamW.
        Engine(
            "ours",
            whole_logits=False,
            graphed_decoding=True,
            # docs/gpu.md: a rollout of 256 tokens of a 0.5B model in 1.9 s on an H200
            decode_layer_seconds=200e-6,
            loss="streamed",
            prefill_tokens=PREFILL_TOKENS,
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            packs=True,
        ),
        Engine(
            "vllm",
            compiled=True,
            decode_layer_seconds=60e-6,
            op_seconds=0.0,
            repeats_kv=False,
            prefill_tokens=8192,  # max_num_batched_tokens
        ),
    )
}


def engine(name: str) -> Engine:
    """The facts of an engine. Raises CostError if it is not known."""
    if name not in ENGINES:
        raise CostError(
            f"engine {name!r} is not known. Known: {', '.join(ENGINES)}. Add its facts to ENGINES "
            "in costs/tables/engines.py."
        )
    return ENGINES[name]
