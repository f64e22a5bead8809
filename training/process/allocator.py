"""Memory allocation of a stage on a CPU: stable thresholds, and freed memory returned to the system.

Left to itself, glibc's malloc maps large blocks one by one at first, and raises the size from which it does so to that
of the largest block freed, up to 32 MiB. From then on tensors lie in its heap, where a block that torch aligned does
not fit the hole that one of its own size left: peaks of a stage came to lie a quarter above its tensors, and stayed.
With a fixed limit a large tensor is a mapping of its own, which ends with it. Mapping costs time; huge pages
(`training/__init__.py`) make up for it.

On other C libraries nothing here has an effect.
"""

import ctypes
from typing import Any

MAPPED_BYTES = 2 * 2**20
"""Blocks of at least a huge page are mapped."""
TRIMMED_BYTES = 32 * 2**20
"""Free heap memory worth returning: returning and reallocating this much takes some 10 ms."""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt(3)."""


class _Mallinfo2(ctypes.Structure):
    """Result of mallinfo2(3)."""

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
    """Map large blocks from now on, with a fixed threshold; the first call of a stage."""
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIMMED_BYTES)  # otherwise each free at the end of the heap would shrink it


def release_free_memory() -> None:
    """Return free heap memory, so that the next phase's peak is its own; skipped if it is little."""
    trim = _c_function("malloc_trim")
    if trim is not None and free_bytes() >= TRIMMED_BYTES:
        trim(0)


def free_bytes() -> int:
    """Free bytes of the main heap that were not returned. 0 if unknown."""
    info = _c_function("mallinfo2")
    if info is None:
        return 0
    info.restype = _Mallinfo2
    return int(info().fordblks)


def _c_function(name: str) -> Any:
    """A function of the C library, None if it has none of this name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
