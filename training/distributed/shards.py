"""Weights and optimizer state on disk as safetensors: each process writes its shard, and reads what it needs from all
shards.

What is divided is written by whoever has it; what all processes have is written once, by one of them. Reading maps the
files into memory and copies the slices that this process needs, so a run can go on with another number of processes
and another `sharding`. Every process must come here, with the same names. Source: torch.distributed.checkpoint, in its
safetensors format: nothing is unpickled.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from training.distributed import collectives
from training.distributed.tensor_file import write_file

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Folder names in a checkpoint."""
REST = "rest.json"
"""Values of an optimizer that are not tensors."""


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's shard of `tensors` to its own file in `folder`."""
    storages: set[int] = set()
    apart = {}  # safetensors refuses tensors that share memory
    for name, tensor in tensors.items():
        place = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
        apart[name] = tensor.detach().clone() if place in storages else tensor.detach()
        storages.add(place)
    with _alone_or_together(), _first_reason():
        save(apart, storage_writer=_OneAtATime(str(folder), save_distributed=True))


class _OneAtATime(HuggingFaceStorageWriter):
    """torch's writer without its copies: it builds a file's bytes, copied three times, before writing."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file. No index is needed: the files of a sharded checkpoint describe themselves."""
        items = {item.index.fqn: item for item in plan.items}
        chunks = {name: _tensor_data(item) for name, item in items.items()}
        shapes = {
            name: torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="meta")
            for name, data in chunks.items()
        }
        offsets = {name: {SAVED_OFFSETS_KEY: list(data.chunk.offsets)} for name, data in chunks.items()}
        metadata = {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
        if items:
            file = Path(self.path) / _gen_file_name(1, 1, plan.storage_data["shard_index"])
            tensors = ((name, _resolved(planner, item)) for name, item in items.items())
            write_file(file, shapes, tensors, metadata)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    """This process's shard of a tensor."""
    resolved = planner.resolve_data(item)
    assert isinstance(resolved, Tensor)
    return resolved


def _tensor_data(item: WriteItem) -> TensorWriteData:
    """A part of a tensor to write."""
    assert item.tensor_data is not None
    return item.tensor_data


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read `tensors` in place, of sharded ones this process's shard. Raises ValueError or RuntimeError for another
    shape or name.
    """
    with _alone_or_together(), _first_reason():
        load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
        )


@contextmanager
def _first_reason() -> Iterator[None]:
    """Raise the error of a process, such as a full disk, instead of torch's wrapper, which is not an Exception."""
    try:
        yield
    except CheckpointException as error:
        reasons = [reason for reason, _ in error.failures.values() if isinstance(reason, Exception)]
        if not reasons:
            raise
        raise reasons[0] from None


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Write the state of the optimizer of these parameters."""
    state = {name: optimizer.state.get(parameter, {}) for name, parameter in named.items()}
    tensors = {
        f"{name}/{key}": value
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    save_tensors(folder, tensors)
    if collectives.rank() == 0:  # optimizers with other values are never sharded
        others = {
            name: {key: value for key, value in of.items() if not isinstance(value, Tensor)}
            for name, of in state.items()
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        (folder / REST).write_text(json.dumps({"groups": groups, "values": others}), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Load the state written by `save_optimizer` into an optimizer with any sharding."""
    rest = json.loads((folder / REST).read_text(encoding="utf-8"))
    state: dict[str, dict[str, Any]] = {name: dict(rest["values"][name]) for name in named}
    tensors: dict[str, Tensor] = {}
    for key, stored in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        name, field = key.rsplit("/", 1)
        if name in named and isinstance(stored, TensorStorageMetadata):
            tensors[key] = state[name][field] = _room(named[name], stored)
    load_tensors(folder, tensors)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups = optimizer.state_dict()["param_groups"]
    merged = [{**group, **_tuples(saved)} for group, saved in zip(groups, rest["groups"], strict=True)]
    content = {
        "state": {index[id(named[name])]: values for name, values in state.items() if values},
        "param_groups": merged,
    }
    optimizer.load_state_dict(content)


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, such as Adam's betas."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _room(parameter: nn.Parameter, stored: TensorStorageMetadata) -> Tensor:
    """A tensor for a value of the optimizer: sharded like its parameter if it has an element per weight."""
    if stored.size == parameter.shape and stored.properties.dtype == parameter.dtype:
        return torch.zeros_like(parameter, requires_grad=False)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


def _alone_or_together() -> warnings.catch_warnings:
    """Suppress the warning for a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
