"""What a model looks like, from the fields of its `config.json` alone: widths, layers, and exact parameter counts.

No weights are read. Counts are of the causal language model of the family (backbone and output head), and are checked
against Transformers' own modules in tests/costs/tables/test_shapes.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from config.errors import CostError
from costs.tables.families import FAMILIES, Traits

_FIELDS: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder (or BERT-like encoder). Widths are numbers of features, counts are of parameters."""

    name: str
    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    tied: bool
    positions: int = 0
    """Rows of a learned position table, 0 with rotary or ALiBi positions."""
    embedding_width: int = 0
    """Width of the token embedding where it is projected to the model's (OPT-350M); 0 where it is the model's own."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    final_norm: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_expert_width: int = 0

    @property
    def traits(self) -> Traits:
        return FAMILIES[self.family]

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int, float]]:
        """Linear layers of one transformer layer: name -> (inputs, outputs, how many a token uses)."""
        d, f = self.width, self.mlp_width
        attention: dict[str, tuple[int, int, float]] = {
            "q": (d, self.query_width, 1),
            "k": (d, self.kv_width, 1),
            "v": (d, self.kv_width, 1),
            "o": (self.query_width, d, 1),
        }
        names = ("gate", "up", "down") if self.traits.gated else ("up", "down")
        if not self.experts:
            return attention | {name: ((f, d, 1) if name == "down" else (d, f, 1)) for name in names}
        e, used = self.expert_width, self.experts_per_token
        mlp = {name: ((e, d, used) if name == "down" else (d, e, used)) for name in names}
        shared = self.shared_expert_width
        extra = (
            {f"shared_{name}": ((shared, d, 1) if name == "down" else (d, shared, 1)) for name in names}
            if shared
            else {}
        )
        return attention | {"router": (d, self.experts, 1)} | mlp | extra

    def adapted(self, modules: Collection[str], packed: bool) -> dict[str, tuple[int, int, float]]:
        """The `matrices` that adapters on `modules` are put beside. Where query, key and value (and gate and up) are
        `packed` in one matrix, one adapter serves them, whichever of them was named.
        """
        named = {name: matrix for name, matrix in self.matrices.items() if name in modules}
        packs = (("q", "k", "v"), *((("gate", "up"),) if self.traits.packed_gate else ())) if packed else ()
        for parts in packs:
            if named.keys() & set(parts):
                inputs, _, used = self.matrices[parts[0]]
                outputs = sum(self.matrices[part][1] for part in parts)
                named = {name: matrix for name, matrix in named.items() if name not in parts} | {
                    "+".join(parts): (inputs, outputs, used)
                }
        return named

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer's linear layers, all experts."""
        copies = {"gate": self.experts or 1, "up": self.experts or 1, "down": self.experts or 1}
        return sum(i * o * copies.get(name, 1) for name, (i, o, _) in self.matrices.items())

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        return floor(sum(i * o * used for i, o, used in self.matrices.values()))

    @property
    def feed_forward_parameters(self) -> int:
        """Weights of one layer's feed-forward part that a token is multiplied with."""
        return floor(
            sum(i * o * used for name, (i, o, used) in self.matrices.items() if name not in ("q", "k", "v", "o"))
        )

    @property
    def layer_small_parameters(self) -> int:
        """Biases and norms of one layer."""
        t = self.traits
        biases = (self.query_width + 2 * self.kv_width) * self.qkv_bias + self.width * self.out_bias
        biases += ((1 + t.gated) * self.mlp_width + self.width) * self.mlp_bias
        per_norm = 2 if t.norm == "layer" else 1
        gate = self.width if self.family == "qwen2_moe" else 0  # the shared expert's own gate
        return biases + self.norms * per_norm * self.width + 2 * self.head_dim * t.qk_norm + gate

    @property
    def layer_parameters(self) -> int:
        return self.layer_matrix_parameters + self.layer_small_parameters

    @property
    def embedding_parameters(self) -> int:
        """Token and position tables, with OPT-350M's projections."""
        e = self.embedding_width or self.width
        return self.vocab * e + self.positions * self.width + (2 * e * self.width if self.embedding_width else 0)

    @property
    def head_parameters(self) -> int:
        """The output head's own weights, 0 where it shares the embedding."""
        head = 0 if self.tied else self.vocab * (self.embedding_width or self.width)
        return head + (self.vocab if self.traits.head_bias else 0)

    @property
    def outer_parameters(self) -> int:
        """Everything outside of the layers and the output head."""
        per_norm = 2 if self.traits.norm == "layer" else 1
        norms = int(self.final_norm) + int(self.traits.embedding_norm)
        # token types, two norms, the head's dense layer and bias
        bert = 7 * self.width + self.width**2 + self.vocab if self.family == "bert" else 0
        return self.embedding_parameters + norms * per_norm * self.width + bert

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the output head: the part that a reward or value model shares with the language model."""
        return self.outer_parameters + self.layers * self.layer_parameters

    @property
    def parameters(self) -> int:
        """The causal language model's parameters; a tied head is counted once."""
        return self.backbone_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters a token meets: all of a dense model, the routed experts of a mixture."""
        return self.parameters - self.layers * (self.layer_matrix_parameters - self.active_layer_parameters)

    @property
    def scored(self) -> "ModelShape":
        """The shape of a reward or value model on this one: its scalar head (`width` weights, not counted) takes the
        place of an output head.
        """
        return replace(self, tied=True)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in the fields of a Transformers `config.json`.

    Raises CostError for an architecture that is not in `FAMILIES` or a config without the needed fields.
    """
    if "text_config" in config:
        config = {
            **config["text_config"],
            "model_type": config["text_config"].get("model_type", config.get("model_type")),
        }
    family = str(config.get("model_type", "")).lower()
    if family not in FAMILIES:
        raise CostError(
            f"architecture model_type={family!r} of {name} is unknown to the planner. Known: "
            f"{', '.join(sorted(FAMILIES))}. Add its traits to FAMILIES in costs/tables/families.py."
        )
    sizes = {ours: _first(config, theirs, name) for ours, theirs in _FIELDS.items()}
    return _shape(FAMILIES[family], config, name, family, sizes)


def _first(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise CostError(
        f"config.json of {name} has no positive {' or '.join(keys)}; the planner needs it. Add it "
        "to the file or to costs/tables/shapes.yaml."
    )


def _shape(traits: Traits, config: Mapping[str, Any], name: str, family: str, sizes: dict[str, int]) -> ModelShape:
    width, heads = sizes["width"], sizes["heads"]
    mlp = (
        config.get("intermediate_size")
        or config.get("n_inner")
        or config.get("ffn_dim")
        or config.get("ffn_hidden_size")
    )
    positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    embedding = config.get("word_embed_proj_dim") or width
    bias = bool(config.get("attention_bias", False))
    opt_bias = bool(config.get("enable_bias", True))
    plain_bias = family == "falcon" and bool(config.get("bias", False))
    return ModelShape(
        name=name,
        family=family,
        **sizes,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=config.get("head_dim") or width // heads,
        mlp_width=int(mlp or 4 * width),
        tied=bool(config.get("tie_word_embeddings", traits.tied)) if family != "falcon" else True,
        positions=positions + traits.positions if traits.positions >= 0 else 0,
        embedding_width=embedding if embedding != width else 0,
        qkv_bias=(traits.qkv_bias and opt_bias) or bias or bool(config.get("use_qkv_bias")) or plain_bias,
        out_bias=(traits.out_bias and opt_bias) or (bias and family in ("llama", "gemma", "gpt_neox")) or plain_bias,
        mlp_bias=(traits.mlp_bias and opt_bias) or bool(config.get("mlp_bias", False)) or plain_bias,
        norms=_norms(config, traits, family),
        final_norm=traits.final_norm and family != "bert" and config.get("do_layer_norm_before", True),
        experts=int(config.get("num_local_experts") or config.get("num_experts") or 0),
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
        expert_width=int(config.get("moe_intermediate_size") or mlp or 0),
        shared_expert_width=int(config.get("shared_expert_intermediate_size") or 0),
    )


def _kv_heads(config: Mapping[str, Any], family: str, heads: int) -> int:
    if family == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    return int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)


def _norms(config: Mapping[str, Any], traits: Traits, family: str) -> int:
    """Falcon's newer layers normalise attention and feed-forward apart."""
    if family == "falcon":
        return 2 if config.get("new_decoder_architecture") or not config.get("parallel_attn", True) else 1
    return traits.norms
