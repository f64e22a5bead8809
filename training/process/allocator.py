"""How a stage on a CPU gets memory: in steady pieces, and back to the system as soon as it is free.

Left to itself, glibc's malloc maps large blocks one by one at first, and raises the size from which
it does so to that of the largest block freed, up to 32 MiB. From then on tensors lie in its heap,
where a block that torch aligned does not fit the hole that one of its own size left: peaks of a
stage came to lie a quarter above its tensors, and stayed. With a fixed limit a large tensor is a
mapping of its own, which ends with it. Mapping costs time; huge pages (`training/__init__.py`) make
up for it.

On other C libraries nothing here has an effect.
"""

import ctypes
from typing import Any

MAPPED_BYTES = 2 * 2**20
"""Blocks from here on are mapped: a huge page. The planner's costs/formulas/process_heap.py has it
too.
"""
TRIMMED_BYTES = 32 * 2**20
"""Free memory of the heap that is worth giving back: this many bytes take some 10 ms to be given
back and had again.
"""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt(3)."""


class _Mallinfo2(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def configure() -> None:
    """Have large blocks mapped from now on, whatever is freed; the first thing a stage does."""
    mallopt = _found("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIMMED_BYTES)  # else each free at the heap's end would shrink it


def release_free_memory() -> None:
    """Return what the heap holds free, so that the next phase's peak is its own; nothing if it is
    little.
    """
    trim = _found("malloc_trim")
    if trim is not None and free_bytes() >= TRIMMED_BYTES:
        trim(0)


def free_bytes() -> int:
    """Of the main heap: freed and not given back. 0 where it cannot be asked."""
    info = _found("mallinfo2")
    if info is None:
        return 0
    info.restype = _Mallinfo2
    return int(info().fordblks)


def _found(name: str) -> Any:
    """A function of the C library, None where it has none of this name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
