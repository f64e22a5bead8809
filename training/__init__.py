"""The machine learning: one module per stage, each a process of its own (`python -m training.<stage>`), and the maths
they share.
"""

import logging
import os
import sys

from training.process import garbage_collection

garbage_collection.defer_collection()

# Importing peft imports bitsandbytes, which warns of a kernel that it would like to download; nothing here needs it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# torch reads this once, at its first tensor: large tensors on a CPU get huge pages where the system has them, as they
# are mapped and unmapped one by one (training/process/allocator.py).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Nothing here is compiled. Importing bitsandbytes, which importing peft does, would have torch's compiler imported
# (1.6 of 10 CPU seconds and 53 MiB), and its numbers would depend on whether the machine has a C compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Threads that wait for each other spin 5,000 times, some microseconds, before they sleep: libgomp reads this once,
# when torch is imported. On an idle machine most waits are shorter, and beside processes that compete for the cores it
# costs nothing. libgomp's default is 300,000, some milliseconds, which occupies a core that another thread may need
# (docs/performance.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# A log needs no progress bars. Set here: importing datasets to set it would cost 1.4 CPU
# seconds in stages that do not use it.
if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
