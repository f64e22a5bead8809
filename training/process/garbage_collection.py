"""Tunes Python's cyclic garbage collector for a process with long imports.

Imports create a million objects, nearly all permanent. By default the collector scans them again and again: a fifth of
the CPU time of a stage's imports, and some 0.3 s for each full collection while the stage works.
"""

import gc
import sys

IMPORTING = (50_000, 10, 10)
WORKING = gc.get_threshold()
"""Python's default: a cycle that holds a tensor must be collected soon."""


def defer_collection() -> None:
    """Collect rarely while one of our processes (`python -m training.X`) imports."""
    if sys.argv[0] == "-m":
        gc.set_threshold(*IMPORTING)


def begin_work() -> None:
    """After such imports, collect as usual, but exclude existing objects: they are imports, which stay."""
    if gc.get_threshold() == IMPORTING:
        gc.freeze()
        gc.set_threshold(*WORKING)
