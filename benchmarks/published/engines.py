"""Facts about the software of published measurements, and what changed with its versions.

Each is read from the software's code or counted with saved-tensor hooks, never fitted to one measurement.
"""

import difflib
from dataclasses import dataclass, replace

from config.errors import CostError
from costs.tables.engines import ENGINES as OWN
from costs.tables.engines import Engine


@dataclass(frozen=True)
class Software(Engine):
    """One piece of software, with what published runs of it need to be compared."""

    admits_by_cache: bool = False
    """A server whose requests wait until the paged cache has room for them: of a batch as many sequences run as fit
    (arXiv 2309.06180 section 4.5).
    """
    prefill_launches: float = 0.0
    """Operations that one layer launches for a prompt, outside of the graph of decoding."""
    reports_reserved: bool = False
    """The memory that it prints is what the allocator holds."""
    widens_unquantised: bool = False
    """Prepares quantised models with the rest of their weights in fp32 (PEFT)."""
    iterates_micro_batches: bool = False
    """What it prints as an iteration is one micro-batch, not an optimizer step."""
    loop_seconds: float = 0.7
    """Fixed time of an iteration of a loop: replies are decoded and read again, metrics written, processes wait for
    each other. 0.7 s are what a step of 3.8 s in DeepSpeed-Chat's log has beyond its parts; ours are counted by
    operation.
    """


def facts(found: Engine) -> Software:
    """An engine of this table, with the facts that the planner does not have."""
    assert isinstance(found, Software)
    return found


ENGINES = {
    "ours": Software(**vars(OWN["ours"]), loop_seconds=0.0),
    "vllm": Software(**vars(OWN["vllm"]), admits_by_cache=True, prefill_launches=20),
} | {
    engine.name: engine
    for engine in (
        Software(
            "transformers",
            concatenates_cache=True,
            loss="dense",
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            widens_unquantised=True,
        ),
        # Its log has the allocator's maximum (torch.cuda.max_memory_reserved).
        Software(
            "ms-swift",
            concatenates_cache=True,
            loss="dense",
            lora_input_bytes=4,
            repeats_kv=False,
            fused_activation=False,
            reports_reserved=True,
            widens_unquantised=True,
        ),
        Software(
            "transformers-2022",
            concatenates_cache=True,
            whole_prefill=True,
            loss="shifted",
            lora_input_bytes=4,
            step_copies=1,
            context_bytes=1343 * 2**20,
            fused_activation=False,
        ),
        Software("torchtune", loss="chunked", repeats_kv=True, attention_copy=True),
        Software("torchtune-2024", loss="shifted", attention_copy=False),
        # Packed projection, LoRA on it padded with zeros (litgpt/lora.py zero_pad), bitsandbytes 0.41 on all linear
        # layers.
        Software(
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
        # Triton flash attention, fused norms (low-precision layer norm), fp32 master weights under FSDP mixed
        # precision.
        Software(
            "llm-foundry",
            # `loss_fn: fused_crossentropy`, its default: llmfoundry/models/mpt/modeling_mpt.py
            loss="kernel",
            fused_norm=True,
            pointwise=0.75,
            op_seconds=8e-6,
            layer_ops=20,
        ),
        Software(
            "megatron",
            loss="in-place",
            fused_norm=True,
            pointwise=0.75,
            op_seconds=8e-6,
            layer_ops=20,
            vendor_products=True,
        ),
        Software("nanogpt", loss="half", fused_norm=True, compiled=True),
        # Hand-written kernels: fused norms, rotary positions and SwiGLU, a loss that never holds all logits.
        Software("unsloth", loss="liger", fused_norm=True, compiled=True, layer_ops=20, reports_reserved=True),
        Software("gpt-fast", compiled=True, decode_layer_seconds=60e-6, op_seconds=0.0),
        Software("deepspeed-chat", loss="shifted", layer_ops=25, concatenates_cache=True, whole_prefill=True),
        # PyTorch's own modules under FSDP2, losses whole, attention with values repeated for grouped queries; fp32
        # weights cast for computing (torchtitan/models/llama).
        Software("torchtitan", loss="dense", repeats_kv=True, layer_ops=30),
        # Transformers' modules under FSDP1, bitsandbytes' NF4 (fsdp_qlora/train.py).
        Software("fsdp-qlora", concatenates_cache=True, loss="shifted", fused_activation=False, repeats_kv=False),
        # One process a device over Transformers' modules: FSDP by name, and NeMo's Automodel.
        Software("pytorch-fsdp", loss="dense", repeats_kv=False, fused_activation=False),
        Software("automodel", loss="dense", repeats_kv=False, fused_activation=False),
        Software("gpt-neox", loss="dense", fused_norm=True, pointwise=0.75, layer_ops=25),
        # Generation servers: weights and paged cache, one CUDA graph a step; DeepSpeed's kernels are injected, and
        # launched one by one.
        Software(
            "lmdeploy",
            admits_by_cache=True,
            compiled=True,
            decode_layer_seconds=40e-6,
            prefill_launches=20,
            op_seconds=0.0,
            repeats_kv=False,
            prefill_tokens=8192,
        ),
        Software("deepspeed-inference", compiled=True, layer_ops=22, repeats_kv=False),
        # PPO over DeepSpeed ZeRO with Transformers' modules; generation by them or by vLLM.
        Software(
            "openrlhf", concatenates_cache=True, loss="dense", lora_input_bytes=4, repeats_kv=False, layer_ops=30
        ),
        Software("verl", loss="dense", lora_input_bytes=4, repeats_kv=False, layer_ops=30),
    )
}

SHIFTED_UNTIL = "2024-09"
"""Month of Transformers 4.45, whose loss no longer copies the shifted logits and whose prefill makes those of the last
token alone.
"""
CHUNKED_FROM = "2024-10"
"""Month of torchtune's loss in chunks."""
ON_TRANSFORMERS = ("transformers", "ms-swift", "openrlhf", "verl")


def engine(name: str) -> Software:
    """The facts of an engine. Raises CostError if it is not known."""
    if name not in ENGINES:
        close = difflib.get_close_matches(name.lower(), ENGINES, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise CostError(f"engine {name!r} is not known. {hint}Known: {', '.join(ENGINES)}.")
    return ENGINES[name]


def as_of(found: Software, month: str) -> Software:
    """The facts of an engine in a month, `2023-12`."""
    if found.name == "torchtune":
        return found if month >= CHUNKED_FROM else ENGINES["torchtune-2024"]
    if month >= SHIFTED_UNTIL:
        return found
    old = found.name in ON_TRANSFORMERS
    return replace(found, loss="shifted", whole_prefill=True) if old else found


@dataclass(frozen=True)
class Defaults:
    """What a piece of software does where a row does not say."""

    attention: str = "sdpa"
    sharding: str = "ddp"
    """With more than one device."""
    trained_weights: str = "dtype"
    """Of full fine-tuning: see `Run.trained_weights`."""
    lora_modules: tuple[str, ...] | None = None
    """None: queries and values, of a quantised base all linear layers."""
    lora_dropout: bool = False


ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
_TUNE = Defaults(sharding="fsdp", lora_modules=("q", "v", "o", "gate", "up", "down"))
DEFAULTS: dict[str, Defaults] = {
    "torchtune": _TUNE,
    "torchtune-2024": _TUNE,
    "litgpt": Defaults(sharding="fsdp", lora_dropout=True),
    "torchtitan": Defaults(sharding="fsdp", trained_weights="fp32"),
    "pytorch-fsdp": Defaults(sharding="fsdp", trained_weights="fp32"),
    "automodel": Defaults(sharding="fsdp", lora_modules=ALL_LINEAR),
    "fsdp-qlora": Defaults(sharding="fsdp", lora_modules=ALL_LINEAR),
    "llm-foundry": Defaults("flash", "fsdp", "fp32"),
    "megatron": Defaults("flash", "zero1", "dtype_and_fp32", ALL_LINEAR),
    "gpt-neox": Defaults(sharding="zero1", trained_weights="dtype_and_fp32"),
    "unsloth": Defaults("flash", lora_modules=ALL_LINEAR),
    "openrlhf": Defaults("flash", trained_weights="dtype_and_fp32"),
    "verl": Defaults("flash", trained_weights="dtype_and_fp32"),
    "nanogpt": Defaults("flash"),
    "transformers-2022": Defaults("eager"),
    "deepspeed-chat": Defaults("eager", trained_weights="dtype_and_fp32"),
}
"""Engine -> its own defaults; those of a plain PyTorch loop for the others."""


def defaults(found: Engine) -> Defaults:
    return DEFAULTS.get(found.name, Defaults())
