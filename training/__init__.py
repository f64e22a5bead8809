"""The machine learning: one module per stage, each a process of its own (`python -m training.<stage>`), and the maths they share."""

import logging
import os

# Importing peft imports bitsandbytes, which warns of a kernel that it would like to download; nothing here needs it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# torch reads this once, at its first tensor: large tensors on a CPU get huge pages where the system has them, as they are mapped and unmapped
# one by one (training/heap.py).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
