"""Plans of drawn settings have the memory that the stages hold on the pretended accelerator."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_sixty_drawn_settings_hold_what_was_planned(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pretend.plans", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "found.json").read_text())
    errors = {(cell, phase): planned / held - 1 for cell, phase, planned, held in content}
    assert len({cell for cell, _ in errors}) == 60
    off = sorted(map(abs, errors.values()))
    assert median(off) < 0.05
    assert off[round(0.95 * len(off)) - 1] < 0.15, sorted(errors.items(), key=lambda one: one[1])
    assert off[-1] < 0.25, sorted(errors.items(), key=lambda one: one[1])
