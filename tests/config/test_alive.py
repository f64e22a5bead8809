import subprocess
import sys
import time

import psutil
import pytest

from config.alive import created, is_alive, now


def test_a_process_is_known_by_when_it_was_created() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        since = created(process.pid)
        assert now() == pytest.approx(since, abs=5.0)
        assert is_alive(process.pid, since)
        assert not is_alive(process.pid, since - 60.0), "an earlier process of the same id"
        process.kill()
        deadline = time.monotonic() + 10.0
        while is_alive(process.pid, since):
            assert time.monotonic() < deadline, "it is dead, though its parent has not asked for it"
    assert not is_alive(process.pid, since)
    with pytest.raises(psutil.NoSuchProcess):
        created(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no other time")
def test_a_clock_that_is_set_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boot time moves with the clock, and with it the time at which psutil has processes created."""
    pid, since, clock = psutil.Process().pid, created(psutil.Process().pid), time.time
    boot = psutil.boot_time()
    monkeypatch.setattr(time, "time", lambda: clock() + 3600.0)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 3600.0)
    assert is_alive(pid, since)
