"""Kills training processes at random moments and starts them again: do they end with the bits of the run that was
never killed?

    python benchmarks/crash_resume.py [--kills 60] [--seed 1] [--start fork|exec] [--json]

A tiny helpdesk run of the stages sft, reward, ppo and distill. Each stage first runs undisturbed; then it is started,
killed with SIGKILL at a moment uniform over the seconds of that run, started again, killed again ..., until it is
done, and then from the beginning, until it had its share of the kills. Every output is compared with that of the
undisturbed run, and while a process works and after every kill whatever is visible of an output must be the whole
previous one or the whole new one.

--start fork  (the default) forks the stage's process from one that has imported everything and
              computed nothing, so that kills hit the
              stage's work; exec starts `python -m training.<stage>` as the pipeline does: most kills then hit the
              imports.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from config.methods.registry import stage_module
from training.process.run import entry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also as a script: the code beside it

from config import jsonl  # noqa: E402
from config.load import load, read, write  # noqa: E402
from config.records import AttemptRow, MetricRow, UsageRow  # noqa: E402
from training.process.run import run_stage  # noqa: E402

TRAINED = ("sft", "reward", "ppo", "distill")
OUTPUTS = {
    "sft": ("models/sft", "metrics/sft.json", "plots/sft.csv"),
    "reward": ("models/reward", "metrics/reward.json", "plots/reward.csv", "plots/reward_calibration.csv"),
    "ppo": ("models/ppo", "metrics/ppo.json", "plots/ppo.csv"),
    "distill": ("models/distill", "metrics/distill.json", "plots/distill.csv"),
}
LAST_STEP = {"sft": 40, "reward": 40, "ppo": 16, "distill": 16}
DISTILL = {
    **read(ROOT / "recipes/demo-distill.yaml")["distill"],
    "updates": LAST_STEP["distill"],
    "batch_size": 8,
    "max_new_tokens": 12,
    "checkpoint_every_updates": 2,
    "sft_updates": 4,
    "lmbda": 0.5,
}
SIZES = [
    f"distill={json.dumps(DISTILL)}",
    "data.source.sft_rows=160",
    "data.source.preference_rows=160",
    "sft.log_every_steps=1",
    "reward.log_every_steps=1",
    f"sft.max_steps={LAST_STEP['sft']}",
    f"reward.max_steps={LAST_STEP['reward']}",
    f"ppo.updates={LAST_STEP['ppo']}",
    "sft.checkpoint_every_steps=3",
    "reward.checkpoint_every_steps=3",
    "ppo.checkpoint_every_updates=2",
    "sft.epochs=9.0",
    "reward.epochs=9.0",
    "ppo.kl.controller=adaptive",
    "ppo.kl.horizon=200",
]
POLL_SECONDS = 0.002
PATIENCE_SECONDS = 240.0
Contents = dict[str, bytes]


@dataclass
class Tally:
    """What happened to one stage."""

    stage: str
    undisturbed_seconds: float
    kills: int = 0
    doing: Counter = field(default_factory=Counter)
    """starting, training, checkpointing, evaluating or saving -> kills that hit it."""
    runs: int = 0
    """From the beginning to the end."""
    identical_runs: int = 0
    """Whose every output has the bytes of the undisturbed run's."""
    steps_lost: int = 0
    """Done before a kill and again after it."""
    seconds: float = 0.0
    """Of all attempts."""
    half_written: list[str] = field(default_factory=list)
    """Outputs that were seen neither absent nor whole."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "kills": self.kills,
            "doing": dict(self.doing),
            "runs": self.runs,
            "identical_runs": self.identical_runs,
            "steps_lost": self.steps_lost,
            "seconds_lost": max(0.0, self.seconds - self.runs * self.undisturbed_seconds),
            "undisturbed_seconds": self.undisturbed_seconds,
            "half_written": self.half_written,
        }


# ---------------------------------------------------------------- processes


def begin(root: Path, stage: str, start: str) -> int:
    """Start the stage in `root` as a process of its own; its id. What it prints goes to runs/<stage>/log.txt."""
    (root / "runs" / stage).mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(root)
        log = os.open(root / "runs" / stage / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if start == "exec":
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            os.execve(sys.executable, [sys.executable, "-m", stage_module(stage), stage], environment)
        code = run_stage(stage, *entry(stage))
        sys.stdout.flush()
        os._exit(code)
    except BaseException as error:  # noqa: BLE001, a process that was forked must end here whatever happens
        print(f"{stage}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def finished(root: Path, stage: str, start: str) -> float:
    """Run the stage to its end; its wall seconds. Exits if it fails."""
    began = time.monotonic()
    _, status = os.waitpid(begin(root, stage, start), 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{stage} failed:\n{(root / 'runs' / stage / 'log.txt').read_text('utf-8')[-2000:]}")
    return time.monotonic() - began


def killed(root: Path, stage: str, start: str, after_seconds: float, watch: "Watch") -> bool:
    """Start the stage and kill it after a time, watching its outputs; False if it was done before."""
    began = time.monotonic()
    pid = begin(root, stage, start)
    try:
        while time.monotonic() - began < after_seconds:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pid = 0
                if os.waitstatus_to_exitcode(status) != 0:
                    sys.exit(f"{stage} failed:\n{(root / 'runs' / stage / 'log.txt').read_text('utf-8')[-2000:]}")
                return False
            watch.look()
            time.sleep(POLL_SECONDS)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        pid = 0
        return os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---------------------------------------------------------------- outputs


def contents(root: Path, output: str) -> Contents:
    """File -> bytes of an output, which is a file or a folder; empty if it is not there."""
    path = root / output
    if path.is_file():
        return {output: path.read_bytes()}
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


class Watch:
    """Looks at the outputs of a stage from outside: each must be the whole previous one, the whole new one, or
    absent.
    """

    def __init__(self, root: Path, stage: str, previous: dict[str, Contents], new: dict[str, Contents]) -> None:
        self._root = root
        self._stage = stage
        self._allowed = {output: (previous[output], new[output]) for output in OUTPUTS[stage]}
        self._new = new
        self.half_written: set[str] = set()

    def look(self) -> None:
        """A quick look by names and sizes, as often as possible while a process works."""
        for output, allowed in self._allowed.items():
            sizes = self._sizes(output)
            if sizes and sizes not in [{name: len(content) for name, content in whole.items()} for whole in allowed]:
                self.half_written.add(output)

    def _sizes(self, output: str) -> dict[str, int]:
        """Empty if the output is absent, or was replaced while it was being looked at."""
        try:
            before = (self._root / output).stat().st_ino
            names = (
                [output]
                if (self._root / output).is_file()
                else [f"{output}/{path.name}" for path in (self._root / output).iterdir()]
            )
            sizes = {name: (self._root / name).stat().st_size for name in names}
            return sizes if (self._root / output).stat().st_ino == before else {}
        except FileNotFoundError:
            return {}

    def look_closely(self) -> None:
        """Every byte, with no process running."""
        for output, allowed in self._allowed.items():
            found = contents(self._root, output)
            if found and found not in allowed:
                self.half_written.add(output)

    def replaced(self) -> int:
        """Outputs that are the new ones."""
        return sum(contents(self._root, output) == self._new[output] for output in OUTPUTS[self._stage])


def doing(root: Path, stage: str, began: float, watch: Watch) -> str:
    """What the newest attempt was at when it was killed, from what it left behind. `began` is in seconds since the
    epoch.
    """
    checkpoints = [
        *(root / "checkpoints" / stage).glob("*/.step-*.new"),
        *(root / "checkpoints" / stage).glob("*/trainer/checkpoint-*"),
    ]
    if any(path.stat().st_mtime >= began for path in checkpoints):
        return "checkpointing"
    temporary = [path for output in OUTPUTS[stage] for path in (root / output).parent.glob(f".{Path(output).name}.*")]
    if temporary or watch.replaced():
        return "saving"
    usage = jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows
    if not usage or usage[-1].time < began:
        return "starting"
    return "evaluating" if last_step(root, stage, usage[-1].attempt) >= LAST_STEP[stage] else "training"


def last_step(root: Path, stage: str, attempt: int) -> int:
    """The last step an attempt has a metric row of, 0 without one."""
    return max(
        (
            row.step
            for row in jsonl.read(root / "runs" / stage / "metrics.jsonl", MetricRow).rows
            if row.attempt == attempt
        ),
        default=0,
    )


def steps_done_again(root: Path, stage: str) -> int:
    """Steps of every attempt beyond the one its successor went on from."""
    rows = jsonl.read(root / "runs" / stage / "attempts.jsonl", AttemptRow).rows
    began_at = {row.attempt: 0 for row in rows} | {row.attempt: row.step for row in rows if row.event == "resume"}
    return sum(max(0, last_step(root, stage, attempt) - began_at.get(attempt + 1, 10**9)) for attempt in began_at)


# ---------------------------------------------------------------- the experiment


def undisturbed(folder: Path, start: str) -> tuple[Path, dict[str, float]]:
    """A project whose stages ran undisturbed, and the wall seconds of each."""
    root = folder / "undisturbed"
    root.mkdir()
    write(load(ROOT / "tests/e2e/tiny.yaml", SIZES), root / "params.yaml")
    seconds = {stage: finished(root, stage, start) for stage in ("data", *TRAINED)}
    return root, {stage: seconds[stage] for stage in TRAINED}


def before(reference: Path, root: Path, stage: str) -> dict[str, Contents]:
    """Make `root` the project in which the stages before `stage` have run, with an earlier output of `stage` in place;
    that output.
    """
    shutil.copytree(reference, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    for output in OUTPUTS[stage]:
        path = root / output
        if path.is_dir():
            shutil.rmtree(path)
            path.mkdir()
            (path / "model.safetensors").write_bytes(b"of an earlier run")
        else:
            path.write_text("of an earlier run", encoding="utf-8")
    return {output: contents(root, output) for output in OUTPUTS[stage]}


def crash_and_resume(reference: Path, folder: Path, tally: Tally, kills: int, rng: random.Random, start: str) -> None:
    """Runs of a stage until it was killed `kills` times, each to its end; what happened goes to `tally`."""
    stage = tally.stage
    new = {output: contents(reference, output) for output in OUTPUTS[stage]}
    while tally.kills < kills:
        root = folder / f"{stage}-{tally.runs}"
        watch = Watch(root, stage, before(reference, root, stage), new)
        is_done = False
        while not is_done:
            last = tally.kills >= kills
            began, wall = time.monotonic(), time.time()
            is_done = not killed(
                root, stage, start, PATIENCE_SECONDS if last else rng.uniform(0, tally.undisturbed_seconds), watch
            )
            tally.seconds += time.monotonic() - began
            watch.look_closely()
            if not is_done:
                tally.kills += 1
                tally.doing[doing(root, stage, wall, watch)] += 1
                if last:
                    sys.exit(f"{stage} did not end within {PATIENCE_SECONDS:.0f} s in {root}")
        tally.runs += 1
        tally.identical_runs += watch.replaced() == len(OUTPUTS[stage])
        tally.steps_lost += steps_done_again(root, stage)
        tally.half_written += sorted(watch.half_written)
        shutil.rmtree(root)


def experiment(kills: int, seed: int, start: str, folder: Path) -> dict[str, Any]:
    """The whole experiment below `folder`: what `--json` prints."""
    for stage in ("data", *TRAINED):
        import_module(stage_module(stage))  # once, here: a forked process then starts with its work
    rng = random.Random(seed)
    reference, seconds = undisturbed(folder, start)
    tallies = []
    for place, stage in enumerate(TRAINED):
        tally = Tally(stage, seconds[stage])
        share = kills // len(TRAINED) + (place < kills % len(TRAINED))
        crash_and_resume(reference, folder, tally, share, rng, start)
        tallies.append(tally)
        print(
            f"{stage}: {tally.kills} kills, {tally.identical_runs} of {tally.runs} runs identical",
            file=sys.stderr,
            flush=True,
        )
    return {
        "kills": sum(tally.kills for tally in tallies), "seed": seed, "start": start,
        "identical": all(tally.identical_runs == tally.runs for tally in tallies),
        "half_written": [output for tally in tallies for output in tally.half_written],
        "stages": [tally.as_dict() for tally in tallies],
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    moments = ("starting", "training", "checkpointing", "evaluating", "saving")
    print(
        f"{'stage':<8}{'kills':>6}"
        + "".join(f"{moment:>15}" for moment in moments)
        + f"{'runs':>6}{'identical':>11}{'steps lost':>12}{'seconds lost':>14}"
    )
    for row in found["stages"]:
        counts = "".join(f"{row['doing'].get(moment, 0):>15}" for moment in moments)
        print(
            f"{row['stage']:<8}{row['kills']:>6}{counts}{row['runs']:>6}{row['identical_runs']:>11}{row['steps_lost']:>12}{row['seconds_lost']:>14.1f}"
        )
    print(f"\nbit-identical: {found['identical']}; outputs seen half-written: {len(found['half_written'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", choices=("fork", "exec"), default="fork")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        found = experiment(arguments.kills, arguments.seed, arguments.start, Path(folder))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 0 if found["identical"] and not found["half_written"] else 1


if __name__ == "__main__":
    sys.exit(main())
