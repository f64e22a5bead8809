"""Smaller models from the layers of a larger one."""

import copy
import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from config.errors import ModelError

LAYER = re.compile(r"\.(layers|h)\.(\d+)\.")
"""Position of the layer number in a weight's name."""


def kept_layers(total: int, kept: int, setting: str) -> list[int]:
    """Indices of `kept` of `total` layers, evenly spaced, the first and the last included; the first if only one is
    kept.

    Raises ModelError if there are fewer layers; `setting` is the parameter.
    """
    if kept > total:
        raise ModelError(f"{setting}={kept}, and the model that it starts from has {total}. Lower it in params.yaml.")
    return [round(i * (total - 1) / max(1, kept - 1)) for i in range(kept)]


def with_layers(larger: PreTrainedModel, kept: int, setting: str) -> PreTrainedModel:
    """A language model of `kept` layers of a larger one, with its embeddings, last norm and head; fp32. Raises as
    `kept_layers` does.

    Source of the idea: Sanh et al. 2019 (arXiv:1910.01108), section 3.
    """
    layers = kept_layers(larger.config.num_hidden_layers, kept, setting)
    config = copy.deepcopy(larger.config)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = kept
    if kinds is not None:
        config.layer_types = [kinds[layer] for layer in layers]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=larger.config._attn_implementation, dtype=torch.float32
    )
    model.load_state_dict(_renumbered(larger.state_dict(), layers))
    model.tie_weights()
    return model


def _renumbered(state: Mapping[str, Tensor], layers: list[int]) -> dict[str, Tensor]:
    """The weights of these layers and those outside any layer, under the smaller model's names."""
    renumbered: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = LAYER.search(name)
        if place is None:
            renumbered[name] = tensor
        elif int(place[2]) in layers:
            number = layers.index(int(place[2]))
            renumbered[f"{name[: place.start(2)]}{number}{name[place.end(2) :]}"] = tensor
    return renumbered
