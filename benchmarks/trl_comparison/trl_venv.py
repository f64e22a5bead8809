"""The environment TRL's PPO runs in, .bench/trl-<version>/: that TRL, and otherwise the versions of constraints.txt.

python -m benchmarks.trl_comparison.trl_venv     makes it, or does nothing if it is there
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.projects.checkouts import ROOT
from config.errors import EnvironmentFault

TRL_VERSION = "1.12.0"
"""The last one with a PPO."""
PACKAGES = (f"trl=={TRL_VERSION}", "torch", "transformers", "accelerate", "datasets", "peft")


def bench_python(root: Path = ROOT) -> Path:
    """The interpreter of the environment, which is made first if it is missing or of other versions (minutes, and the
    network).
    """
    folder = root / ".bench" / f"trl-{TRL_VERSION}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    constraints = constraints_without_trl(root)
    versions = "".join(line for line in constraints if line.split("==")[0] in PACKAGES)
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == versions:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    pinned = folder / "constraints.txt"
    pinned.write_text("".join(constraints), encoding="utf-8")
    print(f"making {folder} with {PACKAGES[0]}", file=sys.stderr)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        pinned,
        *PACKAGES,
    ]
    if subprocess.run(install, stdout=sys.stderr, check=False).returncode:
        raise EnvironmentFault(
            f"{folder} could not be filled: see pip's message above. Fix the cause, or remove the "
            "folder, and run again."
        )
    stamp.write_text(versions, encoding="utf-8")
    return python


def constraints_without_trl(root: Path) -> list[str]:
    """The lines of constraints.txt but for its own TRL, so that both sides run on the same torch and transformers."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if not line.startswith("trl==")]


if __name__ == "__main__":
    print(bench_python())
