"""Whether a process that was started earlier still runs, and since when, by a clock that nobody
sets: a clock that is corrected while a run is at work changes neither costs nor who is alive.
"""

import os
import sys
import time
from pathlib import Path

import psutil

if sys.platform == "linux":
    TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

    def now() -> float:
        """Seconds since boot, sleep of the machine included; elsewhere than on Linux since the
        epoch.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def created(pid: int) -> float:
        """When the process `pid` was created, by the clock of `now`. The system's own account of
        that, since the epoch, moves with every correction of the clock.

        Raises psutil.NoSuchProcess.
        """
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            raise psutil.NoSuchProcess(pid) from None
        return int(fields[19]) * TICK_SECONDS  # starttime, field 22 of proc(5)
else:

    def now() -> float:
        return time.time()

    def created(pid: int) -> float:
        return psutil.Process(pid).create_time()


def is_alive(pid: int, since: float) -> bool:
    """Whether the process `pid` that was `created` at `since` still runs: process ids are used
    again, and a dead process whose parent does not ask for it stays in the table, in containers
    mostly.
    """
    try:
        return (
            abs(created(pid) - since) < 1.0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
