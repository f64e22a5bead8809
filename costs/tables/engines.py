"""Facts about training and generation software that change memory and time: frameworks differ by
1.8x for one setting.

Each is an input of the formulas, read from the software's code or counted with saved-tensor hooks,
never fitted to one measurement.
"""

import math
import re
from dataclasses import dataclass, replace

from config.errors import CostError
from costs.quantities import explained


@dataclass(frozen=True)
class Loss:
    """What the cross-entropy over the vocabulary holds, in bytes per logit of 16-bit models (fp32
    models: see `bytes_per_logit`).
    """

    name: str
    kept: float
    """Held for every token at once."""
    chunked: float = 0.0
    """Held for one chunk of tokens at a time."""
    chunks: int = 1
    chunk_logits: int = 0
    """Logits of a chunk where its size is fixed, 0 where the tokens are cut into `chunks` parts."""
    host: float = 0.0
    """Held for each logit of a chunk on a CPU, where a fused kernel is written out in operations; 0
    where it is the same.
    """
    tile_width: int = 0
    """Entries of the vocabulary that a chunk's buffer has room for, however small the vocabulary
    is.
    """
    recomputes: bool = False
    """The backward pass makes the logits again."""

    @explained("B/token")
    def bytes_per_token(
        self,
        vocab: int,
        tokens: float,
        dtype_bytes: float,
        compiled: bool = False,
        host: bool = False,
    ) -> float:
        """Bytes per token at the peak of the loss, for `tokens` tokens at once; `host` on a CPU.

        A compiled chunk is never upcast in memory: it holds logits and their gradient.
        """
        empty = (
            max(0, self.tile_width - vocab)
            * dtype_bytes
            * self._share(max(vocab, self.tile_width), tokens)
        )
        if host and self.host:
            return empty + vocab * self.host * self._share(vocab, tokens)
        if compiled and self.chunked:
            return vocab * (self.kept + 4 * self._share(vocab, tokens))
        # at fp32 the upcast copy and its gradient are the same tensors
        wide = 1.0 if dtype_bytes <= 2 else 12 / 14
        return empty + vocab * wide * (self.kept + self.chunked * self._share(vocab, tokens))

    def _share(self, vocab: int, tokens: float) -> float:
        if not self.chunk_logits or not tokens:
            return 1 / self.chunks
        return min(1.0, max(self.chunk_logits, vocab) / (vocab * tokens))


LOSSES = {
    loss.name: loss
    for loss in (
        # logits 2, their fp32 copy 4, log-softmax 4, its gradient 4:
        # transformers/loss/loss_utils.py ForCausalLMLoss
        Loss("whole", kept=14),
        # the same with a contiguous copy of the shifted fp32 logits and its gradient:
        # Transformers before 4.45, torchtune before October 2024
        Loss("shifted", kept=22),
        # logits 2, log-softmax 2, its gradient 2, the gradient of the logits 2: litgpt's
        # cross-entropy stays in 16 bit
        Loss("half", kept=8),
        # logits 2, their fp32 copy 4, which becomes softmax and gradient in its own place, the
        # gradient of the logits 2: megatron/core/tensor_parallel/cross_entropy.py
        Loss("in-place", kept=8),
        # logits 2 and their gradient 2, in the compute type: one kernel goes over a row of logits
        # with the sums of its softmax in registers: flash-attn's losses/cross_entropy.py
        Loss("kernel", kept=4),
        # logits of all tokens 2, the rest of `whole` for one chunk of eight: torchtune
        # CEWithChunkedOutputLoss
        Loss("chunked", kept=2, chunked=12, chunks=8),
        # hidden states meet the output head one chunk of 2^22 logits at a time, and again in the
        # backward pass: training/modeling/logprobs.py, and much the same in TRL's fused head and
        # Liger
        Loss("streamed", kept=0, chunked=14, chunk_logits=2**22, recomputes=True),
        # TRL 1.16's fused head, of SFT and DPO: tiles of 4,096 tokens by 32,768 entries in the
        # compute type. Without Triton the backward pass over a tile is written in torch: tile, y,
        # z, log p, p, gradient and two terms of it in fp32, and a mask:
        # trl/kernels/chunked_logprob.py
        Loss(
            "fused",
            kept=0,
            chunked=2,
            chunk_logits=4096 * 32768,
            host=33,
            tile_width=32768,
            recomputes=True,
        ),
    )
}


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


NAMES: tuple[tuple[str, str], ...] = (
    (r"deepspeed[- ]?chat|ds-?chat", "deepspeed-chat"),
    (r"open-?rlhf", "openrlhf"),
    (r"ve-?rl|hybridflow", "verl"),
    (r"fsdp[-_]qlora", "fsdp-qlora"),
    (r"torch-?titan", "torchtitan"),
    (r"torch-?tune", "torchtune"),
    (r"lit-?gpt(?: generate)?", "litgpt"),
    (r"lit-?llama", "litgpt"),
    (r"llm-?foundry(?: composer)?|(?:mosaicml )?composer|mosaicml(?: streaming)?", "llm-foundry"),
    (r"gpt-?fast", "gpt-fast"),
    (r"tensorrt[-_]?llm|trt-?llm|tensorrt", "tensorrt-llm"),
    (r"lm-?deploy(?: (?:turbomind|pytorch))?|turbomind|faster[-_ ]?transformer", "lmdeploy"),
    (
        r"deepspeed (?:autotp|inference|fastgen|mii)|deepspeed-(?:inference|fastgen|mii)",
        "deepspeed-inference",
    ),
    (r"sg-?lang", "vllm"),
    (r"(?:hf )?tgi|text[- ]generation[- ]inference", "vllm"),
    (r"gpt-?neox", "gpt-neox"),
    (
        r"nemo[- ]?(?:framework|megatron|aligner|rl|automodel)?(?:[- ]bridge)?"
        r"(?:/megatron(?:[- ]?(?:core|lm))?)?",
        "megatron",
    ),
    (r"megatron[- ]?(?:lm|core|bridge|deepspeed)?", "megatron"),
    (r"transformer[- ]engine", "megatron"),
    (r"nano-?gpt|nano-?chat", "nanogpt"),
    (r"unsloth(?: studio)?", "unsloth"),
    (r"ms-?swift|swift", "ms-swift"),
    (r"llama-?factory", "transformers"),
    (r"axolotl", "transformers"),
    (
        r"(?:hf |hugging ?face )?(?:transformers|trainer|accelerate|trl|peft)"
        r"(?:[ ,/+]+(?:hf )?(?:transformers|trainer|accelerate|trl|peft))*",
        "transformers",
    ),
    (r"(?:sft|dpo|ppo|grpo|reward|rloo)trainer", "transformers"),
    (
        r"alignment[- ]handbook|open-?r1|trlx|bitsandbytes|qlora repo|qlora\.py|lora repo|lmflow|"
        r"fastchat|"
        r"stanford alpaca|alpaca-lora|xtuner|lightning(?: fabric)?|pytorch lightning|"
        r"colossal-?(?:ai|chat)",
        "transformers",
    ),
    (r"vllm", "vllm"),
    (r"deep-?speed", "transformers"),
    (r"(?:plain |native |vanilla )?pytorch(?: fsdp)?|torch", "transformers"),
    (r"\bhf\b|hugging ?face|\(hf trainer\)", "transformers"),
    (r"\bours\b|rlhf[- ]ledger", "ours"),
)
"""(pattern, engine) in the order they are tried: the software that owns the loop before what it
rests on.
"""


SHIFTED_UNTIL = "2024-09"
"""Month of Transformers 4.45, whose loss no longer copies the shifted logits; torchtune's loss in
chunks came in the month after.
"""


def as_of(found: Engine, month: str) -> Engine:
    """The facts of an engine in a month, `2023-12`."""
    if month >= SHIFTED_UNTIL:
        return found
    if found.name == "torchtune":
        return ENGINES["torchtune-2024"]
    resting_on_transformers = ("transformers", "ms-swift", "openrlhf", "verl")
    return replace(found, loss="shifted") if found.name in resting_on_transformers else found


def engine_named(text: str) -> tuple[Engine | None, str]:
    """(engine, what is left of the text) of a printed name: `ms-swift (HF Trainer)`,
    `TensorRT-LLM 0.6.1`. None where no name in it is known. What is left has to be understood by
    others: flags, versions, placement.
    """
    # a remark that holds a version says which rows have it
    rest = re.sub(r"\([^)]*(?:v?\d+\.\d+|\b20\d\d\b)[^)]*\)", " ", text.lower())
    found: str | None = None
    for pattern, name in NAMES:
        match = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", rest)
        if match is None:
            continue
        if found is not None and name == "vllm":
            continue  # generation inside of another loop: a fact of its placement
        found = found or name
        rest = rest[: match.start()] + " " + rest[match.end() :]
    return (None if found is None else ENGINES[found]), rest


def loss(name: str) -> Loss:
    """The facts of a loss. Raises CostError if it is not known."""
    if name not in LOSSES:
        raise CostError(
            f"loss {name!r} is not known. Known: {', '.join(LOSSES)}. Add its facts to LOSSES in "
            "costs/tables/engines.py."
        )
    return LOSSES[name]
