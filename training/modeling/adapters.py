"""LoRA adapters through PEFT: the matrices they adapt, which one is active, and their files.

An adapter's folder has PEFT's own two files, and the config.json and tokenizer of the model it makes:

adapter_model.safetensors   A and B of every adapted matrix; of a reward model also its head
    adapter_config.json         rank, alpha, matrices, and the base
                                (training/modeling/adapter_base.py)

Adapters are put into the layers of the model (PEFT calls it injection), so that the model keeps its class, its
attributes and the names of its parts.
"""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from config.errors import ModelError
from config.sections.levers import Lora
from training.modeling.adapter_base import CONFIG, is_adapter
from training.modeling.lora_linear import fold

WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's files name weights relative to PEFT's wrapper around a model."""
HEAD = "score.weight"

MATRICES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "c_attn", "query_key_value", "qkv_proj"),
    "k": ("k_proj", "c_attn", "query_key_value", "qkv_proj"),
    "v": ("v_proj", "c_attn", "query_key_value", "qkv_proj"),
    "o": ("o_proj", "attn.c_proj", "attention.dense", "self_attn.dense", "self_attention.dense", "out_proj"),
    "gate": ("gate_proj", "gate_up_proj"),
    "up": ("up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1"),
    "down": ("down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2"),
}
"""Our name of a matrix, as in the planner, and its names in model families."""


# ---------------------------------------------------------------- adding adapters


def matrix_names(model: nn.Module, modules: Sequence[str], setting: str) -> list[str]:
    """PEFT's names of the matrices in `modules`, without layer numbers.

    Raises ModelError if one of them matches nothing.
    """
    names = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if any(part.isdigit() for part in name.split(".")) and not name.rpartition(".")[2].startswith("lora_")
        if isinstance(module, nn.Linear | LoraLayer | Conv1D)
    }
    names = {name for name in names if ".lora_" not in name}
    matrix_names: set[str] = set()
    for module in modules:
        module_names = [
            name
            for name in names
            if any(f".{name}".endswith(f".{end}") for end in (*MATRICES.get(module, ()), module))
        ]
        if not module_names:
            present = sorted({_within_layer(name) for name in names})
            general = [
                word for word, ends in MATRICES.items() if any(name.endswith(end) for name in present for end in ends)
            ]
            raise ModelError(
                f"{setting}.modules: {module!r} is not a matrix of this model ({type(model).__name__}). "
                f"It has {', '.join(general)}; by its own names {', '.join(present)}. Change it in params.yaml."
            )
        matrix_names |= {_within_layer(name) for name in module_names}
    return sorted(matrix_names)


def _within_layer(name: str) -> str:
    """model.layers.0.self_attn.q_proj -> self_attn.q_proj"""
    parts = name.split(".")
    last = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[last + 1 :])


def add_adapter(model: PreTrainedModel, lora: Lora, name: str, seed: int, setting: str) -> None:
    """Add a new adapter to `model` and activate it. A is drawn from `seed`, B is zero, so the model's output does not
    change.

    Raises ModelError if `lora.modules` match nothing; `setting` is their section.
    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=matrix_names(model, lora.modules, setting),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config, name)


def begin_adapter(model: PreTrainedModel, lora: Lora, name: str, seed: int, setting: str, start: str | Path) -> None:
    """Add the adapter that a stage trains to `model`, the base of the model at `start`: a copy of the adapter there,
    or a new one if `start` is a full model.

    Raises ModelError as `add_adapter` and `read_adapter` do, and if the copy's rank, alpha or matrices differ from
    `lora`; `setting` is their section.
    """
    if not is_adapter(start):
        add_adapter(model, lora, name, seed, setting)
        return
    read_adapter(model, Path(start), name, lora.dropout)
    config = model.peft_config[name]
    for what, wanted, present in (
        ("rank", lora.rank, config.r),
        ("alpha", lora.alpha, config.lora_alpha),
        ("modules", matrix_names(model, lora.modules, setting), _adapted(model, name)),
    ):
        if wanted != present:
            raise ModelError(
                f"{setting}.{what} is {wanted}, and the adapter in {start} has {present}: one that "
                f"begins as its copy has its rank, alpha and modules. Change {setting} in "
                "params.yaml, or run the stage that made the folder again."
            )


def train_only_adapter(model: PreTrainedModel, lora: Lora, name: str, seed: int, start: str | Path) -> None:
    """`begin_adapter`, with everything else frozen. `name` is the stage's, and `<name>.lora` its place in
    params.yaml.
    """
    model.requires_grad_(False)
    begin_adapter(model, lora, name, seed, f"{name}.lora", start)


def read_adapter(model: PreTrainedModel, folder: Path, name: str, dropout: float = 0.0) -> None:
    """Load the adapter in `folder` into `model` and activate it. Its head, if any, is copied to the model's. In
    training its dropout is `dropout`.

    Raises ModelError if the folder is damaged or was made for another model.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder} cannot be loaded: {str(error).splitlines()[0]}. Run the stage that made it."
        ) from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise ModelError(
                f"{folder} has damaged weights: {error}. Copy the folder again, or run the stage that made it."
            ) from error
        raise
    has_head = "score" in (config.modules_to_save or [])
    # a head is copied below; PEFT would add a second one beside it
    config.inference_mode, config.modules_to_save = (False, None)
    config.lora_dropout = dropout
    try:
        _inject(model, config, name)
    except ValueError as error:
        raise ModelError(
            f"{folder} does not fit its base: {str(error).splitlines()[0]} Run the stage that made it."
        ) from error
    parameters = {_stored_name(key, name): parameter for key, parameter in adapter_parameters(model, name).items()}
    if has_head and isinstance(getattr(model, "score", None), nn.Module):
        parameters[PEFT_PREFIX + HEAD] = model.score.weight
    stored = {key: value for key, value in weights.items() if key in parameters or key != PEFT_PREFIX + HEAD}
    if stored.keys() != parameters.keys() or any(
        parameters[key].shape != value.shape for key, value in stored.items()
    ):
        key = min(
            (parameters.keys() ^ stored.keys())
            or (key for key, value in stored.items() if parameters[key].shape != value.shape)
        )
        raise ModelError(
            f"{folder} does not fit its base: {key.removeprefix(PEFT_PREFIX)} differs. Run the stage that made it."
        )
    with torch.no_grad():
        for key, value in stored.items():
            parameters[key].copy_(value)


def _inject(model: PreTrainedModel, config: LoraConfig, name: str) -> None:
    learning = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    for layer in lora_layers(model):
        layer.enable_adapters(True)
    # GPT-2 keeps its matrices transposed
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    with warnings.catch_warnings():
        # several adapters are intended
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        inject_adapter_in_model(config, model, adapter_name=name)
    for parameter in adapter_parameters(
        model, name
    ).values():  # PEFT takes the base's type, in which small steps would vanish
        parameter.data = parameter.data.float()
    for key, parameter in model.named_parameters():  # PEFT freezes everything but the adapter: the caller decides that
        wrapped = key.replace(".base_layer.", ".")
        parameter.requires_grad_(learning.get(key, learning.get(wrapped, parameter.requires_grad)))
    for layer in lora_layers(model):
        fold(layer)
        layer.train(model.training)  # new dropout modules are in training mode
    model._hf_peft_config_loaded = True  # the Trainer asks whether a quantised model can be trained
    activate(lora_layers(model), name)


def _adapted(model: nn.Module, name: str) -> list[str]:
    """The matrices that the adapter `name` adapts, named as by `matrices`."""
    places = (place for place, module in model.named_modules() if _has(module, name))
    return sorted({_within_layer(place) for place in places})


def _has(module: nn.Module, name: str) -> bool:
    return isinstance(module, LoraLayer) and name in module.lora_A


# ---------------------------------------------------------------- the active adapter


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def active(layers: Sequence[LoraLayer]) -> str | None:
    """The active adapter."""
    if not layers or layers[0].disable_adapters:
        return None
    return str(layers[0].active_adapters[0])


def activate(layers: Sequence[LoraLayer], name: str | None) -> None:
    """Activate the adapter `name`, or none, and deactivate all others; does not change which parameters are
    trained.
    """
    on = [] if name is None else [name]
    for layer in layers:
        layer._active_adapter = on
        layer._disable_adapters = not on


@contextmanager
def activated(layers: Sequence[LoraLayer], name: str | None) -> Iterator[None]:
    before = active(layers)
    activate(layers, name)
    try:
        yield
    finally:
        activate(layers, before)


def recompute_context(
    layers: Sequence[LoraLayer],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: the recomputation uses the adapter that was active in the forward pass."""
    return nullcontext(), activated(layers, active(layers))


# ---------------------------------------------------------------- weights


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """A and B of the adapter `name`, by their path in the model."""
    return {key: p for key, p in model.named_parameters() if f".lora_A.{name}." in key or f".lora_B.{name}." in key}


def adapter_tensors(model: nn.Module, name: str, head: Tensor | None = None) -> dict[str, Tensor]:
    """Tensors in the file of the adapter `name`, by PEFT's names: its own matrices, and the `head` of a reward
    model.
    """
    tensors: dict[str, Tensor] = {
        _stored_name(key, name): parameter for key, parameter in adapter_parameters(model, name).items()
    }
    return tensors if head is None else {**tensors, PEFT_PREFIX + HEAD: head}


def write_adapter_config(
    folder: Path, model: PreTrainedModel, name: str, base: str, revision: str | None, scores: bool
) -> None:
    """Write adapter_config.json, and the config.json of the resulting model: a reward model if it `scores`, else a
    language model. `base` and `revision` come from `named_base`.
    """
    content = {
        **model.peft_config[name].to_dict(),
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "modules_to_save": ["score"] if scores else None,
    }
    config_of(model).save_pretrained(folder)
    (folder / CONFIG).write_text(
        json.dumps(content, indent=2, sort_keys=True, default=_plain) + "\n", encoding="utf-8"
    )


def config_of(model: PreTrainedModel) -> Any:
    """The model's config without settings of weight storage."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def read_head(folder: Path, head: nn.Linear) -> None:
    """Copy the head of the reward model's adapter in `folder`.

    Raises ModelError if it has none of that width.
    """
    stored = load_file(folder / WEIGHTS).get(PEFT_PREFIX + HEAD)
    if stored is None or stored.shape != head.weight.shape:
        raise ModelError(f"{folder} has no head of width {head.in_features}. Run the reward stage.")
    with torch.no_grad():
        head.weight.copy_(stored)


def _plain(value: Any) -> Any:
    """Sort sets, so that the same adapter gives the same bytes."""
    return sorted(value) if isinstance(value, set) else str(value)


def _stored_name(key: str, name: str) -> str:
    return PEFT_PREFIX + key.replace(f".{name}.", ".")


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Merge the active adapter into the base weights and remove all adapters, for full fine-tuning."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            if not module.disable_adapters:
                module.merge(adapter_names=module.active_adapters)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)
    return model


class AdapterView:
    """One role's view of a shared model: its trunk with the role's adapter active, or none, and the role's head and
    config.

    It replaces a PreTrainedModel wherever sequences are run through `base_model`. That call activates the adapter,
    which stays active until another role's call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: str | None,
        precision: AbstractContextManager[Any],
        config: Any = None,
        score: Any = None,
    ) -> None:
        """`score` is the role's scalar head, if it has one.

        `precision` is entered around the trunk: adapter weights are fp32, base weights have the compute type.
        """
        self.model = model
        self.adapter = adapter
        self.config = config if config is not None else model.config
        self.score = score
        self._precision = precision
        self._layers = lora_layers(model)

    def activate_adapter(self) -> None:
        """Activate the role's adapter, for callers that run `model` directly."""
        if active(self._layers) != self.adapter:
            activate(self._layers, self.adapter)

    def base_model(self, **inputs: Any) -> Any:
        self.activate_adapter()
        with self._precision:
            return self.model.base_model(**inputs)

    def get_output_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_output_embeddings()
        return embeddings

    @property
    def device(self) -> torch.device:
        place: torch.device = self.model.device
        return place


def learning(model: PreTrainedModel | AdapterView | nn.Module) -> Mapping[str, nn.Parameter]:
    """Trained parameters of a role by name: a view's adapter and head, or all of a model."""
    if not isinstance(model, AdapterView):
        return dict(model.named_parameters())
    adapter = {} if model.adapter is None else adapter_parameters(model.model, model.adapter)
    if model.score is not None:
        adapter |= {f"score.{key}": parameter for key, parameter in model.score.named_parameters()}
    return adapter
