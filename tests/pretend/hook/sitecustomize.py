"""Python imports this first where the folder is on its path: the process gets the pretended accelerator."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))

import tests.pretend.accelerator  # noqa: F401  # registers the device
