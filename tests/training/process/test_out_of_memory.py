"""Processes that really run out of memory, and end with the weights of those that did not."""

import os
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from config.errors import EnvironmentFault
from config.methods.registry import SAMPLING_METHODS
from costs.ledger.attempts import read_attempts, split_usage
from tests.training.distributed.test_collectives import largest_difference
from tests.training.support.processes import attempts
from tests.training.support.tiny import ROOT, open_stage, work
from training.process.faults import is_out_of_memory
from training.process.out_of_memory import OomBackoff

Project = Callable[..., Path]
LOOP = {
    "updates": 2,
    "batch_size": 256,
    "max_new_tokens": 60,
    "rollout_batch_size": 256,
    "micro_batch_tokens": 32000,
    "num_mini_batches": 1,
}
BIG: dict[str, dict[str, object]] = {
    **dict.fromkeys(SAMPLING_METHODS, LOOP),
    "sft": {"batch_size": 256, "micro_batch_size": 256, "epochs": 4.0},
    "reward": {"batch_size": 256, "micro_batch_size": 256, "epochs": 4.0},
}
ROOM_BYTES = {**dict.fromkeys(SAMPLING_METHODS, 60 * 2**20), "sft": 400 * 2**20, "reward": 45 * 2**20}


def failed_allocation() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has an exbibyte")


def test_what_allocators_say_is_understood() -> None:
    assert is_out_of_memory(failed_allocation())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "HIP error: out of memory",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)",
    ):
        assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_work_is_done_again_with_half_the_size_until_it_fits(project: Project) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    sizes: list[int] = []

    def fits_in_300(size: int) -> str:
        sizes.append(size)
        if size > 300:
            torch.empty(2**60, dtype=torch.uint8)
        return "done"

    backoff = OomBackoff(stage, "ppo.micro_batch_tokens", 1000)
    assert (backoff.run(fits_in_300, 3), backoff.run(fits_in_300, 4)) == ("done", "done")
    assert sizes == [1000, 500, 250, 250]
    said = [row.message for row in attempts(stage.root, "ppo") if row.event == "retry"]
    assert said == [
        f"out of memory at step 3: ppo.micro_batch_tokens {a} -> {b}" for a, b in ((1000, 500), (500, 250))
    ]


def test_what_failed_work_held_is_let_go_before_it_runs_again(project: Project) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    held: list[weakref.ref[torch.Tensor]] = []

    def half_done(size: int) -> None:
        assert all(tensor() is None for tensor in held)
        activations = torch.ones(1000, requires_grad=True).exp()
        held.append(weakref.ref(activations))
        if size > 2:
            torch.empty(2**60, dtype=torch.uint8)

    OomBackoff(stage, "ppo.micro_batch_tokens", 8).run(half_done, 1)
    assert len(held) == 3


def test_what_does_not_fit_in_the_smallest_pieces_is_said_in_one_line(project: Project) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    with pytest.raises(
        EnvironmentFault, match=r"out of memory at step 1 with ppo\.micro_batch_tokens=1, .* rlhf plan"
    ):
        OomBackoff(stage, "ppo.micro_batch_tokens", 4).run(lambda size: torch.empty(2**60, dtype=torch.uint8), 1)


def test_another_error_is_not_tried_again(project: Project) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    with pytest.raises(RuntimeError, match="shapes"):
        OomBackoff(stage, "ppo.micro_batch_tokens", 4).run(lambda size: torch.ones(2, 3) @ torch.ones(2, 3), 1)


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space as Linux does")
@pytest.mark.parametrize(
    "stage",
    [
        "ppo",
        *(
            pytest.param(stage, marks=pytest.mark.slow)
            for stage in (*SAMPLING_METHODS, "sft", "reward")
            if stage != "ppo"
        ),
    ],
)
def test_a_stage_that_runs_out_of_memory_ends_with_the_weights_of_one_that_did_not(
    project: Project, stage: str
) -> None:
    ample, short = (project(stage, name, **{stage: BIG[stage]}) for name in ("ample", "short"))
    if stage not in SAMPLING_METHODS:
        dataset = {"sft": "sft", "reward": "preference"}[stage]
        for root in (ample, short):
            rows = root / "data/prepared" / dataset / "train.jsonl"
            rows.write_text(rows.read_text() * 8)
    work(ample, stage)
    command = [sys.executable, "-m", "tests.training.support.limited", stage, str(ROOM_BYTES[stage])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=short, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    retries = [row for row in attempts(short, stage) if row.event == "retry"]
    assert retries
    assert all("out of memory" in row.message and row.lost_seconds > 0 for row in retries)
    assert largest_difference(ample / "models" / stage, short / "models" / stage) < 5e-6
    (attempt,) = read_attempts(short / "runs" / stage)[0]
    lost = sum(row.lost_seconds for row in retries)
    assert sum(row.seconds for row in split_usage(attempt, [])[1]) == pytest.approx(lost)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
