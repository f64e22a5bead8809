"""A Ray cluster of processes of this machine: a head without resources, and nodes of pools, each with folders of its
own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

from config.ports import free_port

SMALL = ("--object-store-memory", "100000000", "--disable-usage-stats", "--block")
TOKEN = "a token that only its user knows, long enough"


class Cluster:
    """Its nodes are `ray start --block`, in a process group each."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environment = dict(os.environ if environment is None else environment)
        self._short = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets need a short path
        folder.mkdir(parents=True, exist_ok=True)
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._numbers = count()
        self._start(
            "--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0", "--temp-dir", str(self._short),
            "--include-dashboard=false",
        )  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever uses the cluster."""
        return {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }

    def add(self, pool: str, cpus: int = 1) -> subprocess.Popen[bytes]:
        """A node with the label pool."""
        return self._start("--address", self.address, "--num-cpus", str(cpus), "--labels", f"pool={pool}")

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        home = self.folder / f"node-{next(self._numbers)}"
        (home / "home").mkdir(parents=True)
        own = {
            "HOME": str(home / "home"),
            "DVC_SITE_CACHE_DIR": str(home / "dvc-site"),
            "RLHF_WORKSPACES": str(home / "workspaces"),
            "OMP_NUM_THREADS": "1",
        }
        ray_program = Path(sys.executable).with_name("ray")
        environment = self._environment | self.variables | own
        del environment["RAY_ADDRESS"]
        with (home / "ray.log").open("wb") as log:
            node = subprocess.Popen(
                [str(ray_program), "start", *options, *SMALL], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in (home / "ray.log").read_text(errors="replace"):
            assert node.poll() is None, (home / "ray.log").read_text(errors="replace")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self.nodes.append(node)
        return node

    def kill_raylet(self, node: subprocess.Popen[bytes]) -> None:
        """As if the machine had lost its power, but for the processes of stages, which see that they are orphans."""
        for process in psutil.Process(node.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "raylet":
                    process.kill()
        node.wait(60)
        self.nodes.remove(node)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        for process in psutil.process_iter(["cmdline"]):
            if str(self._short) in " ".join(process.info["cmdline"] or []):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self._short, ignore_errors=True)
