"""Python's cyclic garbage collector, for a process that imports for seconds before it works.

Imports make a million objects, of which nearly all stay. By default the collector looks at them
again and again: a fifth of the CPU time of a stage's imports, and some 0.3 s each time that it goes
through all of them while the stage works.
"""

import gc
import sys

IMPORTING = (50_000, 10, 10)
WORKING = gc.get_threshold()
"""Python's own: a cycle that holds a tensor must not wait for long."""


def spare_imports() -> None:
    """Seldom look for garbage, if this process is one of ours (`python -m training.X`) and only
    begins to import.
    """
    if sys.argv[0] == "-m":
        gc.set_threshold(*IMPORTING)


def begin_work() -> None:
    """If imports were spared, collect as usual from now on, without what is there already: that is
    imports, which stay.
    """
    if gc.get_threshold() == IMPORTING:
        gc.freeze()
        gc.set_threshold(*WORKING)
