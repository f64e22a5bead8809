"""Scored replies of the models that are compared, each kept in its own folder."""

import hashlib
import json
from pathlib import Path

from config.inputs import digest_files
from config.methods.registry import SAMPLING_METHODS
from costs.levers.variants import Variant
from tasks.levers.processes import run_helper
from tasks.levers.stage_folders import (
    STUDIES,
    Chain,
    digest,
    lay_out,
    link_outputs,
    stage_folder,
)
from tasks.run.code_version import HOME
from tasks.run.stop import StopRequest

FILE = "answers.json"
CODE = ("levers/answers.py", "inference/replies.py")
"""Modules of training/ that decide the replies beside the model."""


def scored_replies(
    root: Path, variant: Variant, chain: Chain, judge: Chain, sft: bool, stop: StopRequest
) -> Path:
    """Replies of a variant's model to the held-out prompts, or with `sft` those of the SFT model;
    the reward model of `judge` scores them. What already exists is not made again.

    Raises StageStopped, or EnvironmentFault if the process fails.
    """
    last = "sft" if sft or variant.best_of else variant.stages[-1]
    params = variant.params
    content = {
        "evaluate": params.evaluate.model_dump(mode="json"),
        "best_of": variant.best_of, "sft": sft,
        "stage": digest(root, chain, last), "reward": digest(root, judge, "reward"),
        "code": [
            hashlib.sha256((HOME / "training" / name).read_bytes()).hexdigest() for name in CODE
        ],
        "files": {str(path): text for path, text in digest_files(root, params).items()},
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    folder = root / STUDIES / "answers" / f"{last}-{name}"
    if (folder / FILE).exists():
        return folder / FILE
    lay_out(root, folder, params)
    for stage in variant.stages:
        if stage != "reward":
            link_outputs(folder, stage_folder(root, chain, stage), stage)
    link_outputs(folder, stage_folder(root, judge, "reward"), "reward")
    options = ["--out", FILE]
    if variant.best_of:
        options += ["--best-of", str(variant.best_of)]
    elif sft:
        options += ["--role", "sft"]
    elif last in SAMPLING_METHODS:
        rollouts = stage_folder(root, chain, last) / "runs" / last / "rollouts.jsonl"
        options += ["--rollouts", str(rollouts.resolve())]
    run_helper(folder, "training.levers.answers", options, stop)
    return folder / FILE
