"""Facts about training and generation software that change memory and time: frameworks differ by
1.8x for one setting.

Each is an input of the formulas, read from the software's code or counted with saved-tensor hooks,
never fitted to one measurement.
"""

import math
from dataclasses import dataclass, replace

from config.errors import CostError


@dataclass(frozen=True)
class Engine:
    """One piece of software."""

    name: str
    loss: str = "whole"
    compiled: bool = False
    """Pointwise operations are fused (torch.compile): they keep 16-bit inputs only, and cost one
    pass over memory.
    """
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
    """4-bit linear layers keep their input though their weight is frozen (bitsandbytes before
    0.43).
    """
    quantises_head: bool = False
    lora_input_bytes: float = 0.0
    """Bytes per feature of a further copy of a LoRA layer's input (PEFT casts it to the adapter's
    fp32).
    """
    step_copies: float = 0.0
    """Parameter-sized temporaries of the optimizer step (foreach 1, fused 0)."""
    stages_whole_model: bool = False
    """Each device holds the whole model while it is sharded."""
    context_bytes: float = 0.5 * 2**30
    """Device memory outside of the allocator: CUDA context and libraries, loaded lazily since CUDA
    11.7.
    """
    op_seconds: float = 17e-6
    """Host time to launch one small operation from Python, modules and bookkeeping around it
    included: 45 of them are the 0.77 ms a layer that Transformers takes to decode.
    """
    layer_ops: float = 45.0
    """Operations that one layer launches forward."""
    lora_ops: float = 4.0
    """Further operations for each adapted matrix."""
    quantised_ops: float = 4.0
    """Further operations for each quantised matrix when decoding one token."""
    pointwise: float = 1.0
    """Traffic of norms, activations, rotary positions and residuals relative to eager Transformers;
    fused by a compiler 0.42.
    """
    overlap: float = 0.9
    """Share of collective communication hidden behind computation."""
    decode_layer_seconds: float = 0.0
    """Fixed time of one layer in one decoding step when compiled (launch from a CUDA graph, tails
    of small kernels).
    """
    packs: bool = False
    """Passes of alignment stages take rows without padding, filled up to a budget of tokens, and
    the last layer's feed-forward part runs at the tokens alone whose hidden states are read
    (training/modeling/packing.py, training/modeling/last_layer.py).
    """
    concatenates_cache: bool = False
    """The cache of keys and values grows by concatenation (Transformers' dynamic cache)."""
    admits_by_cache: bool = False
    """A server whose requests wait until the paged cache has room for them: of a batch as many
    sequences are at work as fit (arXiv 2309.06180 section 4.5).
    """
    fp8_cache: bool = False
    """With weights in fp8 the cache is too."""
    prefill_launches: float = 0.0
    """Operations that one layer launches for a prompt, outside of the graph of decoding."""
    prefill_tokens: float = math.inf
    """Tokens of prompts that go through the model at once; longer ones in chunks."""
    reports_reserved: bool = False
    """The memory that it prints is what the allocator holds."""
    widens_unquantised: bool = False
    """Prepares quantised models with the rest of their weights in fp32 (PEFT)."""
    iterates_micro_batches: bool = False
    """What it prints as an iteration is one micro-batch, not an optimizer step."""
    sequence_parallel: bool = False
    """Tensor parallelism also divides norms, residual stream and checkpoints by tokens (arXiv
    2205.05198 section 4.2.2).
    """
    selective_ops: bool = False
    """`selective` recomputation keeps the attention output and every other matrix product, and
    makes the rest again (torchtitan's policy `op`); else only attention is made again.
    """
    start_seconds: float = 12.0
    """Imports and set-up of one process."""


ENGINES = {
    engine.name: engine
    for engine in (
        # Ours: Transformers eager, losses and log-probs streamed over tokens, PEFT adapters,
        # torch's fused AdamW.
        Engine(
            "ours",
            loss="streamed",
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            packs=True,
        ),
        Engine(
            "transformers",
            concatenates_cache=True,
            loss="whole",
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            widens_unquantised=True,
        ),
        # Its log has the allocator's maximum (torch.cuda.max_memory_reserved).
        Engine(
            "ms-swift",
            concatenates_cache=True,
            loss="whole",
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            reports_reserved=True,
            widens_unquantised=True,
        ),
        Engine(
            "transformers-2022",
            concatenates_cache=True,
            loss="shifted",
            lora_input_bytes=4,
            step_copies=1,
            context_bytes=1343 * 2**20,
            fused_activation=False,
        ),
        Engine("torchtune", loss="chunked", repeats_kv=True, attention_copy=True),
        Engine("torchtune-2024", loss="shifted", attention_copy=False),
        # Packed projection, LoRA on it padded with zeros (litgpt/lora.py zero_pad), bitsandbytes
        # 0.41 on all linear layers.
        Engine(
            "litgpt",
            loss="half",
            packed_view=True,
            wide_norm=True,
            padded_lora=True,
            quantised_keeps_input=True,
            quantises_head=True,
            stages_whole_model=True,
            iterates_micro_batches=True,
            op_seconds=20e-6,
            layer_ops=50,
            lora_ops=15,
        ),
        # Triton flash attention, fused norms (low-precision layer norm), fp32 master weights under
        # FSDP mixed precision.
        Engine(
            "llm-foundry",
            # `loss_fn: fused_crossentropy`, its default: llmfoundry/models/mpt/modeling_mpt.py
            loss="kernel",
            fused_norm=True,
            pointwise=0.75,
            op_seconds=8e-6,
            layer_ops=20,
        ),
        Engine(
            "megatron",
            loss="in-place",
            fused_norm=True,
            pointwise=0.75,
            op_seconds=8e-6,
            layer_ops=20,
            sequence_parallel=True,
        ),
        Engine("nanogpt", loss="half", fused_norm=True, compiled=True),
        # Hand-written kernels: fused norms, rotary positions and SwiGLU, a loss that never holds
        # all logits.
        Engine(
            "unsloth",
            loss="streamed",
            fused_norm=True,
            compiled=True,
            layer_ops=20,
            reports_reserved=True,
        ),
        Engine("gpt-fast", compiled=True, decode_layer_seconds=60e-6, op_seconds=0.0),
        Engine(
            "vllm",
            admits_by_cache=True,
            compiled=True,
            decode_layer_seconds=60e-6,
            op_seconds=0.0,
            repeats_kv=False,
            prefill_launches=20,
            prefill_tokens=8192,  # max_num_batched_tokens
        ),
        Engine("deepspeed-chat", loss="shifted", layer_ops=25, concatenates_cache=True),
        # PyTorch's own modules under FSDP2, losses whole, attention with values repeated for
        # grouped queries; fp32 weights cast for computing (torchtitan/models/llama).
        Engine(
            "torchtitan",
            loss="whole",
            repeats_kv=True,
            layer_ops=30,
            sequence_parallel=True,
            selective_ops=True,
        ),
        # Transformers' modules under FSDP1, bitsandbytes' NF4 (fsdp_qlora/train.py).
        Engine(
            "fsdp-qlora",
            concatenates_cache=True,
            loss="shifted",
            fused_activation=False,
            repeats_kv=False,
        ),
        Engine("gpt-neox", loss="whole", fused_norm=True, pointwise=0.75, layer_ops=25),
        # Generation servers: weights and paged cache, one CUDA graph a step; DeepSpeed's kernels
        # are injected, and launched one by one.
        Engine(
            "tensorrt-llm",
            admits_by_cache=True,
            compiled=True,
            decode_layer_seconds=20e-6,
            prefill_launches=20,
            fp8_cache=True,
            prefill_tokens=8192,
            op_seconds=0.0,
            repeats_kv=False,
        ),
        Engine(
            "lmdeploy",
            admits_by_cache=True,
            compiled=True,
            decode_layer_seconds=40e-6,
            prefill_launches=20,
            op_seconds=0.0,
            repeats_kv=False,
            prefill_tokens=8192,
        ),
        Engine(
            "deepspeed-inference",
            compiled=True,
            layer_ops=22,
            repeats_kv=False,
        ),
        # PPO over DeepSpeed ZeRO with Transformers' modules; generation by them or by vLLM.
        Engine(
            "openrlhf",
            concatenates_cache=True,
            loss="whole",
            lora_input_bytes=4,
            repeats_kv=False,
            layer_ops=30,
        ),
        Engine("verl", loss="whole", lora_input_bytes=4, repeats_kv=False, layer_ops=30),
    )
}


def engine(name: str, compiled: bool | None = None) -> Engine:
    """The facts of an engine; `compiled` overrides its own default. Raises CostError if it is not
    known.
    """
    if name not in ENGINES:
        raise CostError(
            f"engine {name!r} is not known. Known: {', '.join(ENGINES)}. Add its facts to ENGINES "
            "in costs/tables/engines.py."
        )
    found = ENGINES[name]
    return found if compiled is None else replace(found, compiled=compiled)
