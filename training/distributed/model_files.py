"""Saves a trained model: rank 0 writes, gathering one tensor at a time.

model.safetensors           weights, in Hugging Face's layout; of more than SHARD_BYTES as
                            model-00001-of-0000n.safetensors with model.safetensors.index.json
adapter_model.safetensors   weights of an adapter, always one file, as PEFT reads no other

The bytes are those that `save_pretrained` writes of the whole model. Every process of a divided model must come here,
at the same point.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from training.distributed import collectives
from training.distributed.sharding import is_divided, reshard
from training.distributed.tensor_file import Place, empty, write_header, write_tensor
from training.modeling.adapters import WEIGHTS, adapter_tensors, write_adapter_config
from training.process.artifacts import replacing, temporary_of

SHARD_BYTES = 5_000_000_000
"""Larger models are split into files of this size, as in huggingface_hub."""


@contextmanager
def replacing_on_rank0(target: Path) -> Iterator[Path]:
    """`replacing` on rank 0; other ranks get the path and write nothing."""
    if collectives.rank() == 0:
        with replacing(target) as folder:
            yield folder
    else:
        yield temporary_of(target)


def save_model(folder: Path, model: PreTrainedModel, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config and weights, tied ones once and named as on the hub."""
    if not is_divided(model):
        if collectives.rank() == 0:
            model.save_pretrained(folder, max_shard_size=shard_bytes)
        return
    reshard(model)
    state = _state_to_write(model)
    groups = _converted_together(model, state)
    converted = revert_weight_conversion(model, {name: empty(state[name]) for name in state})
    shapes = {name: empty(part) for name, part in converted.items()}  # parts that share nothing
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    files = {file: {name: shapes[name] for name in names} for file, names in split.filename_to_tensors.items()}
    if collectives.rank() == 0:
        _write_config(folder, model)
        if split.is_sharded:
            metadata = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
    _write(folder, files, (_gathered(model, {name: state[name] for name in names}) for names in groups))


def save_adapter(
    folder: Path, model: PreTrainedModel, name: str, base: str, revision: str | None, score: nn.Linear | None = None
) -> None:
    """Write the files of the adapter `name`, of a reward model with its head `score`; `base` as `named_base` gives
    it.
    """
    if is_divided(model):
        reshard(model)
    tensors = adapter_tensors(model, name, score.weight if score is not None else None)
    if collectives.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter_config(folder, model, name, base, revision, score is not None)
    _write(
        folder,
        {WEIGHTS: {key: empty(tensor) for key, tensor in tensors.items()}},
        ({key: _unsharded(tensor)} for key, tensor in tensors.items()),
    )


def _write_config(folder: Path, model: PreTrainedModel) -> None:
    """Other files that `save_pretrained` writes beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


# ---------------------------------------------------------------- groups of tensors


def _state_to_write(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model by name, tied ones once, still divided."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    kept = remove_tied_weights_from_state_dict({k: empty(t) for k, t in state.items()}, model)
    return {name: state[name] for name in kept}


def _converted_together(model: PreTrainedModel, state: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of `state` in groups that the model's conversion to the hub's layout, such as of experts, needs at once:
    each alone, or if that gives something else all of them.
    """
    shapes = {name: empty(tensor) for name, tensor in state.items()}
    together = revert_weight_conversion(model, dict(shapes))
    try:
        parts = [revert_weight_conversion(model, {name: shapes[name]}) for name in state]
    except (RuntimeError, ValueError, KeyError):
        return [list(state)]
    converted = [(name, tensor.shape) for part in parts for name, tensor in part.items()]
    same = sorted(converted) == sorted((name, tensor.shape) for name, tensor in together.items())
    return [[name] for name in state] if same else [list(state)]


def _gathered(model: PreTrainedModel, group: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A group in the form it is written. Collective; only rank 0 gets it."""
    unsharded = {name: _unsharded(tensor) for name, tensor in group.items()}
    return revert_weight_conversion(model, unsharded) if collectives.rank() == 0 else {}


def _unsharded(tensor: Tensor) -> Tensor:
    """A full tensor on the CPU of rank 0, an empty one on other ranks. Collective."""
    local = tensor.detach()
    whole = local.full_tensor() if isinstance(local, DTensor) else local
    return whole.cpu() if collectives.rank() == 0 else whole.new_empty(0)


def _write(folder: Path, files: Mapping[str, Mapping[str, Tensor]], tensors: Iterator[Mapping[str, Tensor]]) -> None:
    """Write `tensors`, a few at a time, to their files. Collective; rank 0 writes."""
    first = collectives.rank() == 0
    places: dict[str, Place] = {}
    if first:
        for file, shapes in files.items():
            places |= write_header(folder / file, shapes)
    for group in tensors:
        for name in group if first else ():
            write_tensor(places.pop(name), group[name])
        del group
    if places:
        raise RuntimeError(f"{folder} was not given {min(places)}")
