"""The data that dvc.yaml says a stage depends on are the files that it opens, as Linux sees it: Python's own trace
misses what safetensors, tokenizers and Arrow read.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config.dvc_stages import defined
from tests.conftest import ROOT
from tests.training.conftest import PIPELINE
from tests.training.support.tiny import run_main

IN_OPEN, IN_ISDIR, IN_NONBLOCK = 0x20, 0x40000000, 0x800
DATA = ("data", "models", "metrics", "plots", "evaluation")
EVENT = struct.Struct("iIII")

OF_OTHER_RUNS = {
    "reward": {"data/prepared/prompts/test.jsonl"},
    "ppo": {"data/prepared/preference", "data/prepared/ratings", "data/prepared/prompts/train.jsonl"},
    "evaluate": {"models/distill"},
}
"""All methods have one list of deps, and only DPO and KTO read pairs and ratings; this run makes no student."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@contextmanager
def opened(root: Path) -> Iterator[set[str]]:
    """The files below `root` that are opened in the block and were there before it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(IN_NONBLOCK)
    folders = {
        libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_OPEN): folder
        for name in DATA
        for folder in [root / name, *(root / name).rglob("*")]
        if folder.is_dir()
    }
    files = {path for folder in folders.values() for path in folder.iterdir() if path.is_file()}
    result: set[str] = set()
    try:
        yield result
        while True:
            try:
                events = os.read(descriptor, 2**20)
            except BlockingIOError:
                break
            while events:
                watch, mask, _, length = EVENT.unpack(events[: EVENT.size])
                name = os.fsdecode(events[EVENT.size :][:length].rstrip(b"\0"))
                events = events[EVENT.size + length :]
                path = folders[watch] / name
                if not mask & IN_ISDIR and path in files:
                    result.add(path.relative_to(root).as_posix())
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("stage", PIPELINE)
def test_a_stage_opens_what_dvc_yaml_says(stage: str, project: Callable[..., Path]) -> None:
    entry = defined(ROOT)[stage]
    paths = [dep.replace("${align.method}", "ppo") for dep in entry["deps"]]
    named = [dep for dep in paths if dep.startswith(DATA)]
    # digests of what lies outside of the project, which the stage reads itself
    deps = {dep for dep in named if not dep.startswith("data/inputs/")}
    deps |= {file for item in entry["params"] if isinstance(item, dict) for file in item}
    outs = tuple(out if isinstance(out, str) else next(iter(out)) for out in entry["outs"])
    root = project(stage)
    with opened(root) as files:
        assert run_main(root, stage) == 0
    read = {file for file in files if not file.startswith(outs)}
    assert {file for file in read if not file.startswith(tuple(deps))} == set()
    unread = {dep for dep in deps if not any(file.startswith(dep) for file in read)}
    assert unread == OF_OTHER_RUNS.get(stage, set())
