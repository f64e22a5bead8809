"""Waiting for what a placed stage does."""

import threading
import time
from collections.abc import Callable

from config import jsonl
from config.records import AttemptRow
from tasks.run.run import Run

LONG = ("sft.epochs=200.0", "sft.max_steps=1200", "sft.checkpoint_every_steps=20")


def attempts(run: Run, stage: str) -> list[AttemptRow]:
    return jsonl.read(run.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


def once(is_so: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Do something as soon as something is so."""

    def wait() -> None:
        until(is_so)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
