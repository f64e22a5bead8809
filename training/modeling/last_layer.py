"""Computes the last layer's feed-forward part only at the tokens that are needed.

Below the last layer every token is needed, since later ones attend to it. Above its attention only tokens whose hidden
states are read are needed: the response tokens in PPO, one token per sequence in a reward model. In a model of L
layers whose prompts are as long as its responses that is about 0.35 / L of all work.

Shapes: N tokens of the packed row, K tokens asked for, D model width.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from training.modeling.adapters import AdapterView

RESIDUAL_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers that are x + attention(norm(x)) followed by x + mlp(norm(x)), under the same names."""


def narrows(model: PreTrainedModel | AdapterView) -> bool:
    """Make the model's last layer respect `keep_K`, if its class is supported; returns whether it does."""
    whole = model.model if isinstance(model, AdapterView) else model
    layers = getattr(whole.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not {kind.__name__ for kind in type(layers[-1]).mro()} & set(
        RESIDUAL_LAYERS
    ):
        return False
    last: Any = layers[-1]
    if not isinstance(last, _Narrow):
        last.__class__ = _narrowing(last.__class__)
    return True


class _Narrow:
    """Original class of a layer whose class `_narrowing` made."""


@cache
def _narrowing(kind: Any) -> Any:
    """A subclass of the layer that respects `keep_K`. A class, because a function stored on the layer would keep it
    alive.
    """

    def forward(layer: Any, hidden_1ND: Tensor, keep_K: Tensor | None = None, **options: Any) -> Tensor:
        """[1, K, D] with `keep_K`, else the layer's usual output."""
        if keep_K is None:
            every: Tensor = kind.forward(layer, hidden_1ND, **options)
            return every
        attended_1ND, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_1ND), **options)
        hidden_1KD = hidden_1ND[:, keep_K] + attended_1ND[:, keep_K]
        kept: Tensor = hidden_1KD + layer.mlp(layer.post_attention_layernorm(hidden_1KD))
        return kept

    return type(f"Narrow{kind.__name__}", (_Narrow, kind), {"forward": forward})
