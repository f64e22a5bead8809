"""What several processes write and read of a checkpoint: each its share, in whatever number they come back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config.records import RENDEZVOUS_VARIABLE
from tests.training.support.divided import WHOLE_BYTES
from tests.training.support.tiny import ROOT
from training.distributed.shards import load_optimizer, load_tensors, save_optimizer, save_tensors
from training.process.usage import peak_memory_bytes, reset_peak_memory


def together(what: str, folder: Path, processes: int) -> list[dict]:
    """What each of so many processes prints."""
    common = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes),
        RENDEZVOUS_VARIABLE: str(folder / f"rendezvous-{what}-{processes}"),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.training.support.divided", what, str(folder)]
    running = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * processes, said
    return [json.loads(out) for out, _ in said]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of its memory as Linux does")
def test_no_process_holds_or_reads_the_whole_of_a_divided_checkpoint(tmp_path: Path) -> None:
    saved = together("save", tmp_path, 4)
    assert [result["grown"] < 0.2 * WHOLE_BYTES for result in saved] == [True] * 4, saved
    for part in ("weights", "optimizer"):
        sizes = [path.stat().st_size for path in (tmp_path / part).glob("*.safetensors")]
        assert len(sizes) == 4
        assert max(sizes) < 0.3 * sum(sizes)
    loaded = together("load", tmp_path, 4)
    assert [result["grown"] < 0.6 * WHOLE_BYTES for result in loaded] == [True] * 4
    assert all(result["sums"] == saved[0]["sums"] for result in loaded)
    other = together("load", tmp_path, 2)[0]
    assert other["sums"] == pytest.approx(saved[0]["sums"], rel=1e-9)


def test_a_process_alone_finds_what_it_wrote_to_the_bit(tmp_path: Path) -> None:
    shared = torch.randn(3, 5)
    first, second = (
        {"a.b": torch.nn.Parameter(shared.clone()), "head": torch.nn.Parameter(torch.ones(1, 3))} for _ in range(2)
    )
    optimizers = [
        torch.optim.AdamW(list(named.values()), lr=rate, betas=(0.8, 0.99), fused=True)
        for named, rate in ((first, 0.1), (second, 0.2))
    ]
    for _ in range(3):
        (first["a.b"].sum() * 1e-3 + first["head"].square().sum()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    save_tensors(tmp_path / "weights", first)
    save_optimizer(tmp_path / "optimizer", optimizers[0], first)
    load_tensors(tmp_path / "weights", second)
    load_optimizer(tmp_path / "optimizer", optimizers[1], second)
    for named, optimizer in zip((first, second), optimizers, strict=True):
        (named["a.b"].square().sum() + named["head"].sum()).backward()
        optimizer.step()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert optimizers[1].param_groups[0]["betas"] == (0.8, 0.99)
    assert optimizers[1].param_groups[0]["lr"] == 0.1


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    table = torch.arange(6.0)
    save_tensors(tmp_path, {"a": table, "b": table})
    result = {"a": torch.zeros(6), "b": torch.zeros(6)}
    load_tensors(tmp_path, result)
    assert torch.equal(result["a"], table)
    assert torch.equal(result["b"], table)


def test_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path, {"a": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match="Size mismatch"):
        load_tensors(tmp_path, {"a": torch.zeros(1, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        load_tensors(tmp_path, {"b": torch.zeros(3, 1)})


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of its memory as Linux does")
def test_what_is_saved_is_not_copied_first(tmp_path: Path) -> None:
    tensors = {f"layer{i}": torch.full((1024, 1024), float(i)) for i in range(24)}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    save_tensors(tmp_path / "warm", {"a": torch.zeros(3)})
    reset_peak_memory(accelerator=False)
    before = peak_memory_bytes(accelerator=False)
    save_tensors(tmp_path / "saved", tensors)
    assert peak_memory_bytes(accelerator=False) - before < 0.25 * whole
    result = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(tmp_path / "saved", result)
    assert all(torch.equal(result[name], tensors[name]) for name in tensors)
