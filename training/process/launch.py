"""`python -m training.process.launch <stage> [--processes N]`: a stage as one process, or as several on this machine
that share its work; with --nodes, --node-rank and --meet on several machines, each with this command.

The number comes from `where` in params.yaml. One: this process becomes the stage.
Several: it stays as their parent, passes SIGTERM and Ctrl-C on to all, prints why one of them fails, ends the others
then, and leaves with the exit code of the whole (0, 2, 75, else a crash). Where one ran out of memory in the middle of
a step, all are started again, and take smaller pieces (training/process/out_of_memory.py). On a machine with several
GPUs each process sees only its own: with more in sight, one alone would be made to use all. A stage also finds its
place where `torchrun` or `accelerate launch` started it: training/distributed/collectives.py reads their variables.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from config import jsonl
from config.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EXIT_SMALLER_PIECES,
    RlhfError,
)
from config.load import load
from config.methods.registry import stage_module
from config.records import (
    FAULT_SUFFIX,
    FAULTS_VARIABLE,
    LAUNCHER_VARIABLE,
    NODES_APART_VARIABLE,
    RENDEZVOUS_VARIABLE,
    AttemptRow,
)
from config.sections.where import SHARED_STAGES

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""Seconds for the others to notice a lost process before they are killed."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEVICE_FILES = Path("/dev")


def main(arguments: Sequence[str]) -> int:
    """Become the stage, or supervise its processes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.process.launch", description="Run a stage as one or several processes."
    )
    parser.add_argument("stage", choices=sorted(SHARED_STAGES))
    parser.add_argument("--processes", type=int, help="over all nodes, instead of what where says in params.yaml")
    parser.add_argument("--nodes", type=int, default=1, help="machines that run this command, with disks of their own")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--meet", default="", metavar="HOST:PORT", help="a free port of the first node")
    options = parser.parse_args(arguments)
    try:
        configured = load(Path("params.yaml")).where.of(options.stage).processes
    except RlhfError as error:
        say(options.stage, str(error))
        return error.exit_code
    processes = configured if options.processes is None else options.processes
    nodes = Nodes(options.nodes, options.node_rank, options.meet)
    if processes < 1 or processes % nodes.total:
        over_nodes = f", and a multiple of --nodes={nodes.total}" if nodes.total > 1 else ""
        say(options.stage, f"--processes={processes} must be at least 1{over_nodes}.")
        return EXIT_BAD_INPUT
    command = [sys.executable, "-m", stage_module(options.stage), options.stage]
    if processes == 1:
        os.execve(command[0], command, os.environ | own_device(0, 1))
    return supervise(options.stage, command, processes, nodes)


class Nodes(NamedTuple):
    """The machines that share a stage's processes."""

    total: int = 1
    rank: int = 0
    """Which of them this is."""
    meet: str = ""
    """HOST:PORT of the first one."""


ONE_NODE = Nodes()


def supervise(stage: str, command: Sequence[str], processes: int, nodes: Nodes = ONE_NODE) -> int:
    """Run `command` as a group of `processes` processes over all nodes, restarting it as long as they request it, of
    one node; returns the combined exit code of those of this node.
    """
    stops: list[int] = []
    while (code := supervise_once(stage, command, processes, stops, nodes)) == EXIT_SMALLER_PIECES:
        if nodes.total > 1:  # the others have to start anew too: whoever started them sees to it
            return EXIT_CRASHED
        note_loss(stage)
        if stops:
            return EXIT_RESUMABLE
        say(
            stage,
            "memory did not suffice in one of its processes: all start again from the last "
            "checkpoint, in smaller pieces.",
        )
    return code


def supervise_once(
    stage: str, command: Sequence[str], processes: int, stops: list[int], nodes: Nodes = ONE_NODE
) -> int:
    """Run `command` as a group of `processes` processes to their end; returns the combined exit code. Received signals
    are appended to `stops`.
    """
    lost_at = None
    printed: set[str] = set()
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-") as folder,
        started(command, processes, Path(folder), stops, nodes) as running,
    ):
        ended = False
        while not ended:
            # poll every one: a later process may have ended
            ended = None not in [process.poll() for process in running]
            print_faults(Path(folder), printed)
            lost = [
                rank
                for rank, process in enumerate(running)
                if process.returncode not in (None, EXIT_DONE, EXIT_RESUMABLE)
            ]
            if lost and lost_at is None:
                lost_at = time.monotonic()
                if running[lost[0]].returncode != EXIT_SMALLER_PIECES:
                    first = nodes.rank * processes // nodes.total
                    say(stage, lost_line(first + lost[0], processes, running[lost[0]].returncode))
            if lost_at is not None and time.monotonic() > lost_at + GRACE_SECONDS:
                break
            if not ended:
                time.sleep(POLL_SECONDS)
        print_faults(Path(folder), printed)
        codes = [process.returncode for process in running if process.returncode is not None]
    return exit_code(codes)


@contextmanager
def started(
    command: Sequence[str], processes: int, folder: Path, stops: list[int], nodes: Nodes = ONE_NODE
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes, with `folder` for rendezvous and error lines. Signals are forwarded to each, and none
    outlives the block.

    They start with signals blocked until their own handlers are installed, so that a stop during start-up is not lost.
    """
    common, local = common_environment(processes, folder, nodes), processes // nodes.total
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        stops.append(signum)
        for process in running:
            process.send_signal(signal.SIGTERM)

    before = {
        number: signal.signal(number, pass_on) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for rank in range(local):
                environment = rank_environment(rank, local) | {"RANK": str(nodes.rank * local + rank)}
                running.append(subprocess.Popen(command, env={**common, **environment}))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def common_environment(processes: int, folder: Path, nodes: Nodes = ONE_NODE) -> dict[str, str]:
    """Environment of every process of the stage on this node."""
    local = processes // nodes.total
    host, _, port = nodes.meet.rpartition(":")
    meeting = (
        {RENDEZVOUS_VARIABLE: str(folder / "rendezvous")}
        if nodes.total == 1
        else {"MASTER_ADDR": host, "MASTER_PORT": port, NODES_APART_VARIABLE: "1"}
    )
    return {
        **os.environ,
        **meeting,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(local),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // local)),
        FAULTS_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


def rank_environment(rank: int, processes: int) -> dict[str, str]:
    """Environment of this rank."""
    device = own_device(rank, processes)
    return {"RANK": str(rank), "LOCAL_RANK": "0" if device else str(rank), **device}


def own_device(rank: int, processes: int) -> dict[str, str]:
    """Environment that shows a process only its own GPU; empty without GPUs, or with fewer than processes, which the
    stage itself refuses.
    """
    devices = visible_devices()
    return {"CUDA_VISIBLE_DEVICES": devices[rank]} if len(devices) >= processes else {}


def visible_devices() -> list[str]:
    """The NVIDIA GPUs visible to child processes, named as in CUDA_VISIBLE_DEVICES; without importing torch, which
    takes seconds.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i, _ in enumerate(DEVICE_FILES.glob("nvidia[0-9]*"))]
    devices = [device.strip() for device in named.split(",")]
    return devices[: next((i for i, device in enumerate(devices) if device in ("", "-1")), len(devices))]


def print_faults(folder: Path, printed: set[str]) -> None:
    """Print the processes' error lines, each once: all of them report bad input."""
    for path in sorted(folder.glob(f"*{FAULT_SUFFIX}")):
        line = path.read_text(encoding="utf-8")
        if line not in printed:
            printed.add(line)
            sys.stderr.write(line)
            sys.stderr.flush()


def note_loss(stage: str) -> None:
    """If rank 0 was killed, record the loss of its attempt up to now."""
    path = Path("runs") / stage / "attempts.jsonl"
    rows: list[AttemptRow] = jsonl.read(path, AttemptRow).rows
    if rows and rows[-1].event != "end":
        jsonl.append(path, rows[-1].model_copy(update={"event": "lost", "time": time.time()}))


def say(stage: str, line: str) -> None:
    sys.stderr.write(f"{stage}: {line}\n")
    sys.stderr.flush()


def usable_cores() -> int:
    """Cores available to this process; macOS has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lost_line(rank: int, processes: int, code: int) -> str:
    """Error line for a process that crashed."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"process {rank} of {processes} {how}: the others end too. A run started again goes on "
        "from the last checkpoint."
    )


def exit_code(codes: Sequence[int]) -> int:
    """Combined exit code of the processes that ended by themselves.

    Bad input in one of them explains crashes of the others, and a crash explains their stops.
    """
    if EXIT_BAD_INPUT in codes:
        return EXIT_BAD_INPUT
    if EXIT_SMALLER_PIECES in codes:
        return EXIT_SMALLER_PIECES
    if EXIT_DIVERGED in codes:
        return EXIT_DIVERGED
    if any(code not in (EXIT_DONE, EXIT_RESUMABLE) for code in codes):
        return EXIT_CRASHED
    return EXIT_RESUMABLE if EXIT_RESUMABLE in codes else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
