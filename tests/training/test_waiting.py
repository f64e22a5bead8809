"""In processes of their own: libgomp reads how its threads wait once, as torch is imported, and says on request what
it read.
"""

import os
import re
import subprocess
import sys

import pytest

LIBGOMPS_OWN = 300_000


def spin_count(code: str, **chosen: str) -> int:
    """Turns that a waiting thread takes before it sleeps, in a process that runs `code`."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **chosen, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    outcome = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if outcome is None:
        pytest.skip("torch's OpenMP is not libgomp here")
    return int(outcome[1])


def test_threads_of_a_stage_that_wait_soon_leave_their_core_to_others() -> None:
    assert spin_count("import torch") == LIBGOMPS_OWN
    assert spin_count("import training.process.device") == 5000


@pytest.mark.parametrize(
    ("chosen", "turns"),
    [
        ({"GOMP_SPINCOUNT": "1234"}, 1234),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 30_000_000_000),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 0),
    ],
)
def test_what_somebody_chose_for_waiting_threads_holds(chosen: dict[str, str], turns: int) -> None:
    assert spin_count("import training.process.device", **chosen) == turns
