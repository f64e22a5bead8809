"""The machine learning: one module per stage, each a process of its own (`python -m training.<stage>`), and the maths they share."""

import logging

# Importing peft imports bitsandbytes, which warns of a kernel that it would like to download; nothing here needs it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
