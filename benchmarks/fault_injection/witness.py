"""What the processes of a case really took, by the system's own account and not by what they say of themselves: Linux,
from /proc.
"""

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_injection.project import MARK, STAGES

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.05


@dataclass
class Seen:
    """A process that a case has started; times in seconds since boot, which no clock moves."""

    pid: int
    began: float
    command: tuple[str, ...]
    ended: float | None = None

    @property
    def stage(self) -> str | None:
        """Of a stage's own process, started by `python -m`."""
        if len(self.command) < 3 or self.command[1] != "-m":
            return None
        module, *rest = self.command[2:]
        if module == "training.process.launch" and rest:
            return rest[0]
        name = module.removeprefix("training.")
        return name if name in STAGES else None

    def is_named(self, pattern: str) -> bool:
        return re.search(pattern, " ".join(self.command)) is not None


class Witness:
    """Looks at /proc many times a second, from a thread."""

    def __init__(self, mark: str) -> None:
        self._wanted = f"{MARK}={mark}".encode()
        self._others: set[tuple[int, float]] = set()
        self._seen: dict[tuple[int, float], Seen] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        with self._lock:
            alive = self._alive()
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            for key, process in self._seen.items():
                if process.ended is None and key not in alive:
                    process.ended = now

    def _alive(self) -> set[tuple[int, float]]:
        result = set()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                key = (int(folder.name), int(fields[19]) / TICKS)
                if fields[0] in "ZX" or key in self._others:
                    continue
                command = (folder / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
                if key in self._seen:
                    if command[0]:  # it may have become another program
                        self._seen[key].command = tuple(command)
                elif self._wanted in (folder / "environ").read_bytes().split(b"\0"):
                    self._seen[key] = Seen(*key, command=tuple(command))
                elif time.clock_gettime(time.CLOCK_BOOTTIME) - key[1] > 1.0:
                    self._others.add(key)  # a younger one may be about to become another program
                    continue
                result.add(key)
        return result

    def processes(self) -> list[Seen]:
        """All so far, oldest first."""
        with self._lock:
            return sorted(self._seen.values(), key=lambda process: process.began)

    def alive(self, pattern: str = "") -> list[Seen]:
        self.look()
        return [process for process in self.processes() if process.ended is None and process.is_named(pattern)]

    def of_stage(self, stage: str) -> list[Seen]:
        return [process for process in self.processes() if process.stage == stage]

    def stage_seconds(self) -> float:
        """Wall seconds of all processes of stages together, up to now for a running one."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return sum((process.ended or now) - process.began for process in self.processes() if process.stage is not None)
