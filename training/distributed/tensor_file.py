"""Safetensors files written one tensor at a time: only that tensor has to be in CPU memory.

The shapes of all tensors are known before, so the header is written first and each tensor goes to its place when it is
there. The bytes are those of safetensors' own `save_file`, which takes all tensors at once (and `save`, which torch's
checkpoints use, copies all of them three times). Source: github.com/huggingface/safetensors, section "Format".
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PYTORCH = {"format": "pt"}
"""Metadata of a weights file."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Type names of the format."""


class Place(NamedTuple):
    """Position of a tensor."""

    file: Path
    offset: int


def empty(tensor: Tensor) -> Tensor:
    """Shape and type, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def write_header(path: Path, shapes: Mapping[str, Tensor], metadata: Mapping[str, str] = PYTORCH) -> dict[str, Place]:
    """Start a file for tensors like `shapes`; returns the position of each.

    The length of the header in 8 bytes, then JSON that says where in the bytes behind it each tensor stands: widest
    types first, then by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at, offsets = 0, {}
    for name in sorted(shapes, key=lambda name: (-shapes[name].element_size(), name)):
        offsets[name], end = at, at + shapes[name].nbytes
        header[name] = {
            "dtype": DTYPES[shapes[name].dtype],
            "shape": list(shapes[name].shape),
            "data_offsets": [at, end],
        }
        at = end
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    return {name: Place(path, 8 + len(content) + offset) for name, offset in offsets.items()}


def write_tensor(place: Place, tensor: Tensor) -> None:
    """Write a tensor at its position."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    with place.file.open("r+b") as opened:
        opened.seek(place.offset)
        opened.write(flat.numpy().data)


def write_file(
    path: Path,
    shapes: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] = PYTORCH,
) -> None:
    """Write `tensors`, shaped like `shapes`, one after the other, and flush them to disk."""
    places = write_header(path, shapes, metadata)
    for name, tensor in tensors:
        write_tensor(places.pop(name), tensor)
    if places:
        raise RuntimeError(f"{path} was not given {min(places)}")
    with path.open("rb") as written:
        os.fsync(written.fileno())
