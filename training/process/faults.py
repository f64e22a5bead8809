"""Classifies exceptions caused by the machine: out of memory, full disk, missing permission."""

import errno
import re
import shutil
from pathlib import Path

import torch

from config.errors import EnvironmentFault

OUT_OF_MEMORY_WORDS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "ERROR_OUT_OF_DEVICE_MEMORY",
)
"""Messages of the CPU's allocators and of shared memory, of the CUDA, HIP and SYCL runtimes, and of cuBLAS and cuDNN,
which allocate outside of torch.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory, on the accelerator or the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS)


def named_fault(error: Exception, target: Path) -> Exception:
    """The one-line EnvironmentFault for a full disk or missing permission; any other error as it is."""
    number = _error_number(error)
    place = getattr(error, "filename", None) or target
    if number in (errno.ENOSPC, errno.EDQUOT):
        at = Path(place)
        existing = next(path for path in (at, *at.resolve().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        return EnvironmentFault(
            f"{place}: no space left on the disk ({free / 2**20:.0f} MiB free). Free some space "
            f"and run again; {target} is unchanged."
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFault(
            f"{place}: no permission to write. Make the folder writable for this user and run "
            f"again; {target} is unchanged."
        )
    return error


def _error_number(error: Exception) -> int | None:
    """The operating system's error number, also if a library hides it.

    Rust libraries report `os error 28`; torch.save only reports that its file is shorter than what was written.
    """
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match:
        return int(match[1])
    return errno.ENOSPC if re.search(r"inline_container.*unexpected pos|file write failed", str(error)) else None
