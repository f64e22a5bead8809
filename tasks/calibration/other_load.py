"""Whether other programs kept the machine busy while it was measured."""

import time

import psutil

from config.errors import EnvironmentFault

BUSY = 0.25
"""Share of the threads that other programs may keep busy."""


class OtherLoad:
    """Samples the processor time of other programs from here on."""

    def __init__(self) -> None:
        self._wall, self._all, self._process = self._now()

    def _now(self) -> tuple[float, float, float]:
        times, process = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return (
            time.perf_counter(),
            sum(times[:8]) - idle,
            process.user + process.system + process.children_user + process.children_system,
        )

    def check(self, threads: int) -> None:
        """Raise EnvironmentFault if other programs left too little for our `threads`."""
        wall, everything, process = (
            now - then for now, then in zip(self._now(), (self._wall, self._all, self._process), strict=True)
        )
        check_quiet((everything - process) / wall, psutil.cpu_count() or 1, threads)


def check_quiet(other_cores: float, cores: int, threads: int) -> None:
    """Raise EnvironmentFault if other programs, which used `other_cores` of `cores` on average, kept more than BUSY of
    the threads waiting.
    """
    missing = other_cores - (cores - threads)
    if missing > BUSY * threads:
        raise EnvironmentFault(
            f"other programs used {other_cores:.1f} of {cores} cores while {threads} threads were "
            "measured: the machine is busy, and plans from these times would be wrong. Run rlhf "
            "calibrate again when nothing else is running, or with fewer threads (OMP_NUM_THREADS)."
        )
