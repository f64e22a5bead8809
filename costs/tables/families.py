"""How the architecture families of Transformers differ in what the planner counts."""

from typing import NamedTuple


class Traits(NamedTuple):
    """How one architecture family differs from the others."""

    norm: str = "rms"
    """`rms` has one vector of weights, `layer` has weights and biases."""
    norms: int = 2
    """Norms in a layer over the model width."""
    gated: bool = True
    """The feed-forward has a gate: three matrices, not two."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    """Norms over each head of queries and keys (Qwen3, Gemma 3)."""
    fused_norm: bool = False
    """The norm is one kernel that keeps its input as it is; the RMS norms of Transformers keep a fp32 copy."""
    packed_qkv: bool = False
    """One matrix for query, key and value."""
    packed_gate: bool = False
    """One matrix for gate and up."""
    tanh_gelu: bool = False
    """Transformers writes GELU's tanh form out, operation by operation."""
    parallel: bool = False
    """Attention and feed-forward both read the layer's input."""
    tied: bool = False
    """Embeddings are shared when the config does not say."""
    positions: int = -1
    """Extra rows of a learned position table; -1 for rotary or ALiBi positions."""
    final_norm: bool = True
    embedding_norm: bool = False


FAMILIES: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "mixtral": Traits(),
    "qwen2": Traits(qkv_bias=True),
    "qwen2_moe": Traits(qkv_bias=True),
    "qwen3": Traits(qk_norm=True),
    "qwen3_moe": Traits(qk_norm=True),
    "gemma": Traits(tied=True),
    "gemma2": Traits(tied=True, norms=4),
    "gemma3_text": Traits(tied=True, norms=4, qk_norm=True),
    "phi3": Traits(packed_qkv=True, packed_gate=True),
    "stablelm": Traits(norm="layer", fused_norm=True),
    "phi": Traits(
        norm="layer",
        norms=1,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        fused_norm=True,
        tanh_gelu=True,
    ),
    "gpt2": Traits(
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        positions=0,
        packed_qkv=True,
        fused_norm=True,
        tanh_gelu=True,
    ),
    "gpt_neox": Traits(
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        packed_qkv=True,
        parallel=True,
        fused_norm=True,
    ),
    "opt": Traits(
        norm="layer", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, positions=2, fused_norm=True
    ),
    "falcon": Traits(norm="layer", gated=False, tied=True, packed_qkv=True, parallel=True, fused_norm=True),
    "bloom": Traits(
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        packed_qkv=True,
        fused_norm=True,
        embedding_norm=True,
    ),
    "mpt": Traits(norm="layer_no_bias", gated=False, tied=True, packed_qkv=True, fused_norm=True),
    "bert": Traits(
        norm="layer", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, positions=0, fused_norm=True
    ),
}
"""Sources: the modelling files of Transformers 5.22, one per family, counted on the meta device in the tests."""
