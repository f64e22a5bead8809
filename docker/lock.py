"""Writes requirements.lock and requirements-cuda.lock: every package with the SHA-256 of its file, as pip resolves
them from constraints.txt on Linux x86_64 with this Python.

    pip install --require-hashes --no-deps -r requirements.lock                              # CPU
    pip install --require-hashes --no-deps -r requirements.lock -r requirements-cuda.lock    # GPUs

torch has two files of one version: the public index has the one with CUDA, other indexes one for CPUs. Both hashes are
listed where pip finds both, that of the public file in any case. The second lock holds what the file with CUDA needs
besides.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from requirements import requirements

ROOT = Path(__file__).parents[1]
HEADER = "# Packages by hash, Linux x86_64, CPython 3.11: `make lock` writes it.\n"

Locked = dict[str, tuple[str, frozenset[str]]]
"""Name -> public version, and SHA-256 of its files."""


def resolve(*wanted: str) -> dict[str, Any]:
    """pip's report of what it would install, with the constraints of this project."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*command, *wanted], check=True)
        return dict(json.loads(report.read_text(encoding="utf-8")))


def locked(report: dict[str, Any]) -> Locked:
    """Packages of a report; where a file came from is left out."""
    packages: Locked = {}
    for entry in report["install"]:
        name = re.sub(r"[-_.]+", "-", entry["metadata"]["name"]).lower()
        version = entry["metadata"]["version"].split("+")[0]
        hashes = entry["download_info"]["archive_info"]["hashes"]
        packages[name] = (version, frozenset({hashes["sha256"]}))
    return packages


def write(path: Path, packages: Locked) -> None:
    lines = [
        f"{name}=={version} " + " ".join(f"--hash=sha256:{digest}" for digest in sorted(hashes))
        for name, (version, hashes) in sorted(packages.items())
    ]
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def write_locks(everything: Locked, public_torch: Locked, folder: Path) -> None:
    """Both files; `public_torch` is torch of the public index with what it needs."""
    version, hashes = everything["torch"]
    both = hashes | public_torch["torch"][1]
    write(folder / "requirements.lock", everything | {"torch": (version, both)})
    besides = {name: public_torch[name] for name in public_torch.keys() - everything.keys()}
    write(folder / "requirements-cuda.lock", besides)


def main() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    everything = locked(resolve(*requirements(project, ["dev"])))
    # === takes no other file of the version than the one without a suffix such as +cpu
    public_torch = locked(resolve(f"torch==={everything['torch'][0]}"))
    cuda = re.compile(r"nvidia-|cuda-|triton$")
    plain = {name: entry for name, entry in everything.items() if not cuda.match(name)}
    write_locks(plain, public_torch, ROOT)


if __name__ == "__main__":
    main()
