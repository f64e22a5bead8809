"""Whether a process that was started earlier still runs."""

import psutil


def is_alive(pid: int, created: float) -> bool:
    """Whether the process `pid` that was created at `created`, seconds since the epoch, still runs:
    process ids are used again, and a dead process whose parent does not ask for it stays in the
    table, in containers mostly.
    """
    try:
        process = psutil.Process(pid)
        return (
            abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
