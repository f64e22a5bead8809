"""A project whose stages are quick scripts that keep the stage contract: what the parent sees of them is the real
thing.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.projects.checkouts import point_remote
from config.dvc_stages import defined
from config.load import load, write
from config.methods.registry import METHODS
from config.schema import Params
from tasks.dvc.reuse import reusable
from tests.conftest import ROOT, git

STAGE = '''
"""A stage by the contract: rows, checkpoint, SIGTERM, atomic output.
`behaviour.txt` says what goes wrong."""
import os, signal, sys, time
from pathlib import Path
from config import jsonl
from config.alive import created, is_alive, now as uptime
from config.records import AttemptRow, MetricRow, UsageRow

name = sys.argv[1]
folder, checkpoint = Path("runs") / name, Path("checkpoints") / name
behaviour = Path("behaviour.txt").read_text() if Path("behaviour.txt").exists() else ""
stop = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stop.append(1))
run_id = os.environ["RLHF_RUN_ID"]
rows = jsonl.read(folder / "attempts.jsonl", AttemptRow).rows
attempt = 1 + max((row.attempt for row in rows), default=0)
step = int(checkpoint.read_text()) if checkpoint.exists() else 0

last = time.time() - (uptime() - created(os.getpid()))

def use(step, phase, tokens=0):
    """All time since the last row, as a stage's meter accounts for it."""
    global last
    now = time.time()
    row = UsageRow(time=now, run_id=run_id, attempt=attempt, step=step, phase=phase,
                   seconds=now - last, tokens=tokens, sequences=1, peak_bytes=1,
                   device="cpu", world_size=1)
    jsonl.append(folder / "usage.jsonl", row)
    last = now

def mark(event, code=None, message=""):
    row = AttemptRow(time=time.time(), run_id=run_id, attempt=attempt, event=event,
                     fingerprint="f", pid=os.getpid(), step=step, exit_code=code,
                     message=message, device="cpu")
    jsonl.append(folder / "attempts.jsonl", row)

if behaviour == "killed early":
    time.sleep(0.8)
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "broken":
    raise ImportError("no module named nothing")
mark("start")
use(0, "start")
print("working", flush=True)
if step:
    mark("resume")
if behaviour == "bad input":
    mark("end", 2, "data/x.json is empty. Fetch it again.")
    sys.exit(2)
if behaviour == "fails alike":
    mark("end", 1, "ZeroDivisionError: division by zero.")
    sys.exit(1)
if behaviour == "diverges":
    mark("end", 3, "loss is nan at step 3.")
    sys.exit(3)
steps = {"long": 40, "endless": 4000}.get(behaviour, 8)
while step < steps:
    time.sleep({"slow": 0.4, "long": 0.2, "endless": 0.1}.get(behaviour, 0.05))
    step += 1
    use(step, "train", tokens=10)
    values = {"loss": 1 / step}
    row = MetricRow(time=time.time(), run_id=run_id, attempt=attempt, step=step, values=values)
    jsonl.append(folder / "metrics.jsonl", row)
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.write_text(str(step))
    if behaviour == "killed once" and attempt == 1 and step == 3:
        time.sleep(1.0)  # longer than a busy machine keeps its parent from looking
        os.kill(os.getpid(), signal.SIGKILL)
    pid, _, at = os.environ.get("RLHF_PIPELINE", "").partition(":")
    if stop or (pid and not is_alive(int(pid), float(at))):
        use(step, "other")
        mark("end", 75, f"{name} was asked to stop after step {step}.")
        sys.exit(75)
checkpoint.unlink()
if behaviour != "forgets":
    Path(f"{name}.out").write_text(Path(f"{name}.in").read_text())
use(step, "other")
mark("end", 0)
'''


def make_project(root: Path, remote: Path, stages: Sequence[str]) -> Path:
    """A checkout with `stages` in a row: the first reads `<stage>.in`, the others what the one before made."""
    root.mkdir()
    (root / "stage.py").write_text(STAGE)
    (root / f"{stages[0]}.in").write_text("one")
    pipeline: dict = {}
    for before, stage in zip([None, *stages], stages, strict=False):
        command = f"python stage.py {stage}"
        pipeline[stage] = {
            "cmd": f"cp {before}.out {stage}.in && {command}" if before else command,
            "deps": [f"{before}.out" if before else f"{stage}.in"],
            "params": [stage],
            "outs": [{f"{stage}.out": {"persist": True}}],
        }
    for method in [stage for stage in pipeline if stage in METHODS]:
        pipeline["align"] = {"foreach": ["${align.method}"], "do": pipeline.pop(method)}
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": pipeline}))
    write(load(ROOT / "recipes" / "demo.yaml"), root / "params.yaml")
    (root / ".dvc").mkdir()
    (root / ".dvc" / "config").write_text(
        "[core]\n    analytics = false\n    remote = local\n['remote \"local\"']\n    url = unused\n"
    )
    point_remote(root, remote)
    git(root, "init", "--quiet")
    return root


def copy_of(folder: Path, place: Path) -> Path:
    """A copy in `place` of the checkout `folder`/project, with a copy of its DVC remote in `folder`/remote as its
    own.
    """
    shutil.copytree(folder / "project", place / "project")
    if (folder / "remote").exists():
        shutil.copytree(folder / "remote", place / "remote")
    point_remote(place / "project", place / "remote")
    return place / "project"


def stale_stages(root: Path, params: Params, stages: Sequence[str]) -> list[str]:
    """Which of `stages` of dvc.yaml a run with `params` would do again."""
    unchanged, known = reusable(root, params, stages), defined(root)
    return [stage for stage in stages if stage in known and stage not in unchanged]
