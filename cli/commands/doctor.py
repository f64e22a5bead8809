"""`rlhf doctor`: one line per requirement of a run, with the fix for each that is not met."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from cli.project import project_root
from config.errors import EXIT_BAD_INPUT, EXIT_DONE, RlhfError
from config.inputs import expected_files
from config.load import load
from config.ports import is_port_free
from config.schema import Params
from config.sections.where import LOCAL
from tasks.run.run import Run
from tasks.run.stop import on_signals
from tasks.run.workspace import pinned_versions
from tasks.servers.processes import servers
from tasks.ui.links import DEFAULT_PORTS

FREE_BYTES_NEEDED = 1 * 2**30
"""The demo writes about 100 MB; MLflow, Prefect and DVC keep copies."""


POOL_SECONDS = 20.0
"""For nodes that are there; an autoscaled pool may have none now."""


class Finding(NamedTuple):
    check: str
    level: Literal["ok", "notice", "problem"]
    """A problem keeps `rlhf run` from working; a notice does not."""
    text: str
    fix: str = ""


def examine(as_json: bool) -> int:
    """Print every finding; exit code 2 if one of them is a problem."""
    root = project_root()
    findings = [finding for check in CHECKS for finding in check(root)]
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(
                f"{finding.level:<8} {finding.check:<11} {finding.text}{f' -> {finding.fix}' if finding.fix else ''}"
            )
    return EXIT_BAD_INPUT if any(finding.level == "problem" for finding in findings) else EXIT_DONE


def python(root: Path) -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding("python", "ok", f"{version} at {sys.executable}")]


def versions(root: Path) -> list[Finding]:
    """Installed versions against constraints.txt: other versions may work, but were not tested together."""
    wanted = pinned_versions(root)
    installed = {
        name: version for name, version in ((name, _installed(name)) for name in wanted) if version is not None
    }
    differing = [
        f"{name} {version}, not {wanted[name]}"
        for name, version in installed.items()
        if version.split("+")[0] != wanted[name]
    ]
    missing = [
        name
        for name in ("torch", "transformers", "trl", "dvc", "prefect", "mlflow", "pydantic")
        if _installed(name) is None
    ]
    fix = f"{sys.executable} -m pip install -c constraints.txt -e ."
    if missing:
        return [Finding("versions", "problem", f"not installed: {', '.join(missing)}", fix)]
    if differing:
        shown = "; ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        return [Finding("versions", "notice", f"other than in constraints.txt: {shown}", fix)]
    return [Finding("versions", "ok", f"{len(installed)} packages as in constraints.txt")]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device(root: Path) -> list[Finding]:
    """Asked in a child process: only stages import torch."""
    code = (
        "import torch; from training.process.device import device, device_name; print(device_name(device()) "
        "if torch.accelerator.is_available() else f'cpu, {torch.get_num_threads()} threads')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return [
            Finding(
                "device",
                "problem",
                f"torch does not load: {done.stderr.strip().splitlines()[-1]}",
                "install torch as in constraints.txt",
            )
        ]
    return [Finding("device", "ok", done.stdout.strip())]


def disk(root: Path) -> list[Finding]:
    free = shutil.disk_usage(root).free
    text = f"{free / 2**30:.1f} GiB free at {root}"
    if free < FREE_BYTES_NEEDED:
        return [
            Finding("disk", "problem", f"{text}, {FREE_BYTES_NEEDED / 2**30:.0f} GiB is needed", "free some space")
        ]
    return [Finding("disk", "ok", text)]


def permission(root: Path) -> list[Finding]:
    places = [
        root,
        *(path for name in ("data", "models", "runs", "metrics", ".rlhf", ".dvc") if (path := root / name).exists()),
    ]
    closed = [str(path) for path in places if not os.access(path, os.W_OK)]
    if closed:
        return [Finding("permission", "problem", f"not writable: {', '.join(closed)}", f"chmod -R u+w {root}")]
    return [Finding("permission", "ok", f"{root} is writable")]


def tools(root: Path) -> list[Finding]:
    """git and DVC are installed, and DVC can read the pipeline."""
    findings = []
    if shutil.which("git") is None:
        findings.append(Finding("git", "notice", "not on PATH: runs do not know their commit", "install git"))
    elif not (root / ".git").exists():
        findings.append(Finding("git", "notice", "no checkout: runs do not know their commit", "git init"))
    else:
        findings.append(Finding("git", "ok", "checkout found"))
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "stage", "list", "--name-only"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        findings.append(
            Finding("dvc", "problem", f"cannot read dvc.yaml: {done.stderr.strip().splitlines()[-1]}", "fix dvc.yaml")
        )
    else:
        findings.append(Finding("dvc", "ok", f"{len(done.stdout.split())} stages"))
    return findings


def ports(root: Path) -> list[Finding]:
    running = {server.name: server for server in servers(root)}
    findings = []
    for name, port in DEFAULT_PORTS.items():
        if name in running:
            findings.append(Finding("port", "ok", f"{name} runs on {running[name].port}"))
        elif is_port_free(port):
            findings.append(Finding("port", "ok", f"{port} is free for {name}"))
        else:
            findings.append(
                Finding(
                    "port",
                    "notice",
                    f"{port} is taken, {name} uses it by default",
                    f"rlhf up --{name}-port {port + 1}",
                )
            )
    return findings


def params_and_data(root: Path) -> list[Finding]:
    try:
        params = load(root / "params.yaml")
    except RlhfError as error:
        return [Finding("params", "problem", str(error))]
    return [Finding("params", "ok", "params.yaml is valid"), *_data_files(root, params)]


def _data_files(root: Path, params: Params) -> list[Finding]:
    findings = []
    for setting, named in expected_files(root, params).items():
        path, shown = root / named, f"{setting}={named}"
        if not path.is_file():
            fix = "put the file there, or fix params.yaml"
            findings.append(Finding("data", "problem", f"{shown} does not exist", fix))
        elif not path.stat().st_size:
            findings.append(Finding("data", "problem", f"{shown} is empty", "fetch it again"))
        else:
            findings.append(Finding("data", "ok", f"{shown}, {path.stat().st_size:,} bytes"))
    return findings or [Finding("data", "ok", "generated, or fetched by the data stage")]


def pools(root: Path) -> list[Finding]:
    """The nodes of the pools that params.yaml names, asked with what a stage would be given there."""
    try:
        params = load(root / "params.yaml")
    except RlhfError:  # another line says so
        return []
    if all(params.where.of(stage).pool == LOCAL for stage in params.stages):
        return []
    from tasks.cluster.placement import look_at_pools

    run = Run(root, "doctor", params)
    try:
        with on_signals() as stop:
            answers = [*look_at_pools(run, params.stages, stop, POOL_SECONDS)]
    except RlhfError as error:
        return [Finding("pool", "problem", str(error))]
    return [Finding("pool", "ok", f"{pool}: {node}") for pool, nodes in answers for node in nodes]


CHECKS: tuple[Callable[[Path], list[Finding]], ...] = (
    python,
    versions,
    device,
    disk,
    permission,
    tools,
    ports,
    params_and_data,
    pools,
)
