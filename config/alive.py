"""Whether a process started earlier still runs, by a monotonic clock: correcting the system clock during a run changes
neither costs nor which processes count as alive.
"""

import os
import sys
import time
from pathlib import Path

import psutil

if sys.platform == "linux":
    TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

    def now() -> float:
        """Seconds since boot, sleep included; on systems other than Linux since the epoch."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def created(pid: int) -> float:
        """Time at which the process `pid` was created, on the clock of `now`. The system's own creation time moves
        with every correction of the clock.

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


def is_running(pid: int) -> bool:
    """Whether a process has this id, which may have been another one's before. Zombies, which stay in the process
    table mostly in containers, do not run.
    """
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped by a signal, as by Ctrl-Z."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def is_alive(pid: int, since: float) -> bool:
    """Whether the process `pid` that was `created` at `since` still runs."""
    try:
        return abs(created(pid) - since) < 1.0 and is_running(pid)
    except psutil.NoSuchProcess:
        return False
