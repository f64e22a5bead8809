"""A container as a node of a Ray cluster: `python -m tasks.cluster.member OPTIONS OF RAY START [-- PROGRAM]`.

The head listens on the address that its name has in the cluster's network, and the others join it there. A head runs
PROGRAM, the worker of the pipelines, beside Ray: it ends with it, and passes SIGTERM on to it. Another node that gets
SIGTERM is drained: its stages checkpoint and go on elsewhere, then Ray ends.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from config.locks import CHECKPOINT_SECONDS
from tasks.cluster.node import REQUEST, clear, home

RAY = (sys.executable, "-m", "ray.scripts.scripts")
START = (*RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory", "100000000")
"""Rows, parameters and locks pass through Ray; 100 MB are more than enough."""
DRAIN = (*RAY, "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "shutting down")
GENERATED = "KUBERAY_GEN_RAY_START_CMD"
HEAD_NAME, PORT = "ray-head", 6379


def main(arguments: Sequence[str]) -> int:
    """Exit code of PROGRAM, or of Ray where there is none."""
    options, program = list(arguments), []
    if "--" in options:
        program = options[options.index("--") + 1 :]
        options = options[: options.index("--")]
    clear(home(), 0.0)
    start, address = _start(options)
    ray = subprocess.Popen(start, start_new_session=True)
    children = [ray]
    if program:
        children.append(subprocess.Popen(program, env={**os.environ, "RAY_ADDRESS": address}))

    def leave(signum: int, frame: FrameType | None) -> None:
        if program:
            children[-1].send_signal(signum)
        else:
            _drain()
            ray.terminate()

    signal.signal(signal.SIGTERM, leave)
    while all(child.poll() is None for child in children):
        time.sleep(0.5)
    for child in reversed(children):
        child.terminate()
        child.wait(CHECKPOINT_SECONDS)
    return children[-1].returncode


def _start(options: Sequence[str]) -> tuple[list[str], str]:
    """The command that starts Ray here, and the address of the cluster: as KubeRay says, where it has made this
    container.
    """
    if GENERATED in os.environ:
        return ["sh", "-c", f"exec {os.environ[GENERATED]}"], os.environ["RAY_ADDRESS"]
    head = socket.gethostbyname(HEAD_NAME)
    mine = ["--node-ip-address", head, "--port", str(PORT), "--include-dashboard=false"]
    return [*START, *options, *(mine if "--head" in options else ["--address", f"{head}:{PORT}"])], f"{head}:{PORT}"


def _drain() -> None:
    """No new stage comes; the drivers of those that are here see it, and clear their workspaces."""
    subprocess.run(DRAIN, check=False)
    until = time.monotonic() + CHECKPOINT_SECONDS
    while time.monotonic() < until and any(home().glob(f"*/{REQUEST}")):
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
