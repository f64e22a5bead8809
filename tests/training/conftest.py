"""One thread per process unless set otherwise, and a project folder in which every stage has run once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from config.load import write
from config.methods.registry import METHODS
from tests.training.support.tiny import params, run_main

PIPELINE = ("data", "sft", "reward", "ppo", "evaluate")
STREAMS = ("runs", "checkpoints")


@pytest.fixture(autouse=True, scope="session")
def threads(own_state: None) -> None:
    """As many as the processes that tests start have; this one's torch was imported before that was decided."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, threads: None) -> Path:
    """A project whose stages all ran undisturbed. Read it; for more take a `project`."""
    root = tmp_path_factory.mktemp("finished")
    write(params(), root / "params.yaml")
    for stage in PIPELINE:
        assert run_main(root, stage) == 0, stage
    return root


def copied(source: Path, root: Path, stage: str, **sections: dict) -> Path:
    """A copy of a project in which the stages before `stage` have run, with params of its own."""
    shutil.copytree(source, root, ignore=shutil.ignore_patterns(*STREAMS))
    first = "ppo" if stage in METHODS else "evaluate" if stage == "distill" else stage
    for later in PIPELINE[PIPELINE.index(first) :]:
        shutil.rmtree(root / "models" / later, ignore_errors=True)
        (root / "metrics" / f"{later}.json").unlink(missing_ok=True)
    write(params(**sections), root / "params.yaml")
    return root


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy in which the stages before `stage` have run, with params of its own."""

    def make(stage: str, name: str = "project", **sections: dict) -> Path:
        return copied(finished, tmp_path / name, stage, **sections)

    return make
