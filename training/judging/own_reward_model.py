"""A judge that is a second reward model: trained by the reward stage with another seed, on pairs that no stage reads.

evaluation/judge/   params.yaml, data/, models/sft and models/reward, as a project has them
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import training
from config.errors import ModelError
from config.load import write
from config.schema import Params
from training.inference.trained_models import TrainedModels
from training.judging.judge import ByScore
from training.modeling.tokenizer import Prompt

FOLDER = Path("evaluation/judge")
OTHER_SEED = 1000
"""Added to the run's."""
READ = ("data/tokenizer", "metrics/data.json", "models/sft", "models/base")


class OwnRewardModelJudge(ByScore):
    """See the module."""

    name = "reward model of its own"

    def __init__(self, root: Path, params: Params) -> None:
        """Train it. Raises ModelError if the stage fails."""
        super().__init__()
        folder = root / FOLDER
        lay_out(root, folder, params)
        code = str(Path(training.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-m", "training.reward"], cwd=folder, env=_environment(code),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ModelError(f"the judge's reward model could not be trained: {last_line}")
        self._models = TrainedModels(folder)

    def scores(self, prompts: Sequence[Prompt], replies: Sequence[str]) -> list[float]:
        return self._models.scores(prompts, replies) if prompts else []


def lay_out(root: Path, folder: Path, params: Params) -> None:
    """A project's folder whose preferences are those of the judge, with everything else of the reward stage's own."""
    shutil.rmtree(folder, ignore_errors=True)
    preferences = folder / "data/prepared/preference"
    preferences.mkdir(parents=True)
    prepared = root / "data/prepared/preference"
    for theirs, ours in (("judge", "train"), ("test", "test")):
        shutil.copyfile(prepared / f"{theirs}.arrow", preferences / f"{ours}.arrow")
    for path in READ:
        if (root / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to((root / path).resolve())
    write(params.model_copy(update={"seed": params.seed + OTHER_SEED}), folder / "params.yaml")


def _environment(code: str) -> dict[str, str]:
    path = os.pathsep.join([code, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}
