import errno
import shutil
from pathlib import Path

import pytest

from training.process import faults


def test_the_room_that_is_named_is_that_of_the_disk_which_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may be a disk of its own: the folder above it is on another."""
    asked_paths: list[Path] = []
    usage = shutil.disk_usage

    def ask(path: Path) -> object:
        asked_paths.append(path)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", ask)
    full = OSError(errno.ENOSPC, "No space left on device")
    faults.named_fault(full, tmp_path)
    faults.named_fault(full, tmp_path / "models" / "ppo")
    assert asked_paths == [tmp_path, tmp_path]
    elsewhere = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/part")
    assert str(faults.named_fault(elsewhere, tmp_path)).startswith("/dev/shm/part: no space")
    assert asked_paths[-1] == Path("/dev/shm")
