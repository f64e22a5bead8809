"""The faults: what each does to a running run, and what undoes it."""

import os
import pty
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

from benchmarks.fault_injection.checks import DATABASE
from benchmarks.fault_injection.project import Project
from benchmarks.fault_injection.witness import Seen, Witness
from benchmarks.fault_injection.world import World
from config.locks import is_held

LOCAL, PLACED = "local", "placed"
OUTAGES = (3.0, 15.0, None)
"""Seconds; None: until the run has ended."""
SHORT_OUTAGES = (3.0, 15.0, 60.0)
"""Of what a placed stage waits for: it has minutes of patience."""
JUMPS = (-86400, -3600, -60, 60, 3600, 86400)
ROOM_BYTES = 48 * 2**20
"""Free on the small disk before it is filled: several checkpoints."""
SOURCE = Path(__file__).with_name("clock.c")
UNTIL_MLFLOW_HAS_A_RUN_SECONDS = 30.0


@dataclass
class Scene:
    """A running case."""

    project: Project
    world: World
    witness: Witness
    stage: str
    rng: random.Random
    run: "Terminal | None" = None
    deleted: str | None = None
    """Key of the MLflow run that was deleted."""
    notes: list[str] = field(default_factory=list)
    """What exactly was done."""

    def kill(self, found: list[Seen], what: str) -> None:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.notes.append(f"{what}: {len(found)} killed")


class Terminal:
    """`rlhf run` as a user starts it: with its output in a file, in a pipe or on a terminal."""

    def __init__(self, scene: Scene, way: str = "file") -> None:
        project = scene.project
        self.path = project.folder / "said.txt"
        self._file = self.path.open("wb")
        self._ours: int | None = None
        output: int = self._file.fileno()
        if way == "pipe":
            self._ours, output = os.pipe()
        elif way == "terminal":
            self._ours, output = pty.openpty()
        self.process = subprocess.Popen(
            project.command("run", "--yes", *scene.world.arguments),
            cwd=project.root,
            env=scene.world.environment,
            stdin=output if way == "terminal" else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=(lambda: ioctl(0, termios.TIOCSCTTY, 0)) if way == "terminal" else None,
        )
        if self._ours is not None:
            os.close(output)
            threading.Thread(target=self._read, args=(self._ours,), daemon=True).start()

    def _read(self, ours: int) -> None:
        with suppress(OSError):
            while content := os.read(ours, 1 << 16):
                self._file.write(content)
                self._file.flush()

    def hang_up(self) -> None:
        """Whoever read its output is gone."""
        assert self._ours is not None
        os.close(self._ours)

    def said(self) -> str:
        self._file.flush()
        return self.path.read_text(errors="replace")


@dataclass(frozen=True)
class Kind:
    name: str
    placement: str
    strike: Callable[[Scene], Callable[[], None] | None]
    """Returns what undoes it, None if nothing has to be."""
    prepare: Callable[[Scene], None] = lambda scene: None
    """Before the run starts."""
    way: str = "file"
    small_disk: bool = False
    outages: tuple[float | None, ...] = (None,)
    """How long it may last; None: until the run has ended."""

    @property
    def key(self) -> str:
        return f"{self.name}, {self.placement}"


# ---------------------------------------------------------------- processes that die


def kill_pipeline(scene: Scene) -> None:
    assert scene.run is not None
    scene.run.process.kill()


def kill_stage(scene: Scene) -> None:
    alive = scene.witness.alive(r"-m training\.")
    scene.kill([process for process in alive if process.stage is not None], "stage")


def kill_recording(scene: Scene) -> None:
    """The pipeline, while DVC records what a stage made: the stage has ended, and DVC's lock is held."""
    assert scene.run is not None
    lock = scene.project.root / ".dvc" / "tmp" / "lock"
    while scene.run.process.poll() is None:
        at_work = any(process.stage for process in scene.witness.alive())
        if not at_work and is_held(lock):
            scene.run.process.kill()
            scene.notes.append("killed while DVC recorded")
            return
        time.sleep(0.005)


def kill_temporary_server(scene: Scene) -> None:
    scene.kill(scene.witness.alive(r"prefect_server \d+ --temporary"), "server")


def kill_everything(scene: Scene) -> None:
    """As when the power fails."""
    scene.kill(scene.witness.alive(), "everything")


def kill_actor(scene: Scene) -> None:
    scene.kill(scene.witness.alive(r"ray::Node"), "actor")


def kill_raylet(scene: Scene) -> Callable[[], None]:
    """The node is gone for the cluster; its processes find out."""
    scene.world.kill_raylet()
    return scene.world.start_node


def hang_up(scene: Scene) -> None:
    assert scene.run is not None
    scene.run.hang_up()


# ---------------------------------------------------------------- what goes away


def stop_server(name: str) -> Callable[[Scene], Callable[[], None]]:
    def strike(scene: Scene) -> Callable[[], None]:
        os.killpg(scene.world.server_pid(name), signal.SIGKILL)
        arguments = list(scene.world.arguments)

        def undo() -> None:
            scene.world.start_server(name)
            scene.world.arguments = arguments

        return undo

    return strike


def hide_remote(scene: Scene) -> Callable[[], None]:
    scene.world.hide_remote()
    return scene.world.show_remote


def shut_store(scene: Scene) -> Callable[[], None]:
    scene.world.shut_store()
    return scene.world.open_store


def fill_disk(scene: Scene) -> Callable[[], None]:
    """Leave a few KiB at most of the project's file system."""
    filler = scene.project.root / ".filler"
    room = scene.rng.choice((0, 0, 64 * 1024))
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            free = shutil.disk_usage(scene.project.root).free - room
            if free < 4096:
                break
            file.write(bytes(min(free, 1 << 20)))
    scene.notes.append(f"{room // 1024} KiB left")
    return lambda: filler.unlink(missing_ok=True)


def delete_mlflow_run(scene: Scene) -> None:
    """One of this run's own, once there is one."""
    path = scene.project.root / DATABASE
    before = scene.project.undisturbed / "project" / DATABASE
    deadline = time.monotonic() + UNTIL_MLFLOW_HAS_A_RUN_SECONDS
    while not (new := _active_runs(path).items() - _active_runs(before).items()):
        if time.monotonic() > deadline:
            scene.notes.append("nothing to delete yet")
            return
        time.sleep(0.2)
    run, key = scene.rng.choice(sorted(new))
    script = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).delete_run(sys.argv[2])"
    subprocess.run(
        [scene.project.command()[0], "-c", script, f"sqlite:///{path}", run],
        env=scene.world.environment,
        check=True,
        capture_output=True,
    )
    scene.deleted = key.partition("/")[2]
    scene.notes.append(f"deleted {scene.deleted}")


def _active_runs(path: Path) -> dict[str, str]:
    query = (
        "select t.run_uuid, t.value from tags t join runs r on t.run_uuid = r.run_uuid"
        " where t.key = 'rlhf.key' and r.lifecycle_stage = 'active'"
    )
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return dict(database.execute(query).fetchall())


# ---------------------------------------------------------------- a clock that jumps


def preload_clock(scene: Scene) -> None:
    library, file = scene.project.folder / "clock.so", clock_file(scene)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    file.write_bytes(struct.pack("q", 0))
    scene.world.environment |= {"FAULTS_CLOCK": str(file), "LD_PRELOAD": str(library)}


def clock_file(scene: Scene) -> Path:
    return scene.project.folder / "clock"


def jump(scene: Scene) -> None:
    seconds = scene.rng.choice(JUMPS)
    with clock_file(scene).open("r+b") as file:
        file.write(struct.pack("q", seconds))
    scene.notes.append(f"{seconds:+d} s")


# ---------------------------------------------------------------- the table


def with_server(name: str) -> Callable[[Scene], None]:
    return lambda scene: scene.world.start_server(name)


def on_pool(scene: Scene) -> None:
    scene.world.start_pool(scene.stage)


KINDS = (
    Kind("kill pipeline", LOCAL, kill_pipeline),
    Kind("kill stage", LOCAL, kill_stage),
    Kind("kill recording", LOCAL, kill_recording),
    Kind("kill temporary server", LOCAL, kill_temporary_server),
    Kind("kill everything", LOCAL, kill_everything),
    Kind("terminal gone", LOCAL, hang_up, way="terminal"),
    Kind("broken pipe", LOCAL, hang_up, way="pipe"),
    Kind("disk full", LOCAL, fill_disk, small_disk=True),
    Kind("mlflow down", LOCAL, stop_server("mlflow"), with_server("mlflow"), outages=OUTAGES),
    Kind("prefect down", LOCAL, stop_server("prefect"), with_server("prefect"), outages=OUTAGES),
    Kind("store down", LOCAL, hide_remote, outages=OUTAGES),
    Kind("mlflow run deleted", LOCAL, delete_mlflow_run),
    Kind("clock jumps", LOCAL, jump, preload_clock),
    Kind("kill pipeline", PLACED, kill_pipeline, on_pool),
    Kind("kill stage", PLACED, kill_stage, on_pool),
    Kind("kill actor", PLACED, kill_actor, on_pool),
    Kind("kill raylet", PLACED, kill_raylet, on_pool, outages=SHORT_OUTAGES),
    Kind("store down", PLACED, shut_store, on_pool, outages=SHORT_OUTAGES),
)
