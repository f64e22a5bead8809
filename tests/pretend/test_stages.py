"""Every stage and method on the pretended accelerator gives what it gives on the CPU."""

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from benchmarks.gpu_report import planned_bytes
from config import jsonl
from config.errors import EXIT_DONE
from config.methods.registry import SAMPLING_METHODS
from config.records import UsageRow
from tests.conftest import ROOT
from tests.pretend.stages import BASES, CELLS
from tests.training.support.processes import attempts, metric_rows, start

pytestmark = pytest.mark.integration
TRAINED = ("sft", "reward")
CLOCK = ("seconds", "runtime", "per_second")
"""In names of figures that differ between any two runs."""
SHARES = ("fraction", "accuracy")
"""In names of shares of a few tokens or pairs: one at the threshold may fall on either side."""
OF_ANOTHER_SIZE = ("ppo paged", "ppo paged adapted", "ppo halved", "ppo in pieces")
"""Cells whose engine has a cache of its own, or that take smaller pieces than they were given."""
HOOK = ROOT / "tests/pretend/hook"


class Both(NamedTuple):
    """The folders of the same cells on both devices."""

    cpu: Path
    sim: Path
    found: dict[str, tuple[int, dict[str, int]]]
    """Exit code, and where the host waited for the device, of each cell on `sim`."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folders = {device: tmp_path_factory.mktemp(device) for device in ("cpu", "sim")}

    def run(device: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.pretend.stages", device, str(folders[device])],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        content: dict[str, Any] = json.loads((folders[device] / "found.json").read_text())
        assert {cell: code for cell, (code, _) in content.items() if code != EXIT_DONE} == {}
        return content

    with ThreadPoolExecutor() as pool:
        _, result = pool.map(run, folders)
    return Both(folders["cpu"], folders["sim"], result)


def figures(root: Path, stage: str) -> list[dict[str, float]]:
    return [
        {name: x for name, x in row.values.items() if not any(word in name for word in CLOCK)}
        for row in metric_rows(root, stage)
    ]


def assert_same_models(first: Path, second: Path, stage: str) -> None:
    result, expected = (
        {file.name: load_file(file) for file in (root / "models" / stage).glob("*.safetensors")}
        for root in (first, second)
    )
    assert result.keys() == expected.keys() != set()
    for name, tensors in expected.items():
        for key, tensor in tensors.items():
            assert result[name][key].sub(tensor).abs().max() < 2e-5, key


def assert_same(on_sim: Path, on_cpu: Path, stage: str) -> None:
    """Figures and weights up to rounding, computed on the device."""
    usage = jsonl.read(on_sim / "runs" / stage / "usage.jsonl", UsageRow).rows
    assert max(row.peak_bytes for row in usage if row.tokens) > 2**18  # a model is there
    result, expected = figures(on_sim, stage), figures(on_cpu, stage)
    assert len(result) == len(expected) > 0
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not any(word in name for word in SHARES):
                assert math.isclose(ours[name], value, rel_tol=1e-4, abs_tol=1e-5), name
    if stage != "evaluate":
        assert_same_models(on_sim, on_cpu, stage)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("stage", TRAINED)
def test_a_trainer_gives_the_same(both: Both, base: str, stage: str) -> None:
    assert_same(both.sim / base, both.cpu / base, stage)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_a_cell_gives_the_same(both: Both, cell: Any) -> None:
    """Up to rounding: on an accelerator, attention of a rollout reads the unused columns too."""
    on_cpu, on_sim = (folder / cell.name.replace(" ", "-") for folder in (both.cpu, both.sim))
    assert attempts(on_sim, cell.stage)[-1].device == "a pretended accelerator"
    assert_same(on_sim, on_cpu, cell.stage)


def test_a_run_goes_on_from_its_checkpoint(both: Both) -> None:
    stopped, straight = both.sim / "ppo-stopped", both.sim / "ppo"
    assert [row.event for row in attempts(stopped, "ppo") if row.event == "resume"] == ["resume"]
    assert figures(stopped, "ppo") == figures(straight, "ppo")
    model = "models/ppo/model.safetensors"
    assert (stopped / model).read_bytes() == (straight / model).read_bytes()


def test_out_of_memory_halves_the_micro_batch(both: Both) -> None:
    said = [row.message for row in attempts(both.sim / "ppo-halved", "ppo") if row.event == "retry"]
    assert said[0] == "out of memory at step 1: ppo.micro_batch_tokens 600 -> 300"


def test_an_update_waits_as_often_however_many_micro_batches_it_has(both: Both) -> None:
    _, in_pieces = both.found["ppo in pieces"]
    _, whole = both.found["ppo"]
    assert in_pieces == whole
    per_update = (
        sum(count for line, count in whole.items() if not line.startswith(("sharding", "tensor_file", "model_files")))
        / 2
    )
    assert per_update <= 20, whole


def test_two_processes_give_what_one_gives(both: Both, tmp_path: Path) -> None:
    root = tmp_path / "ppo"
    subprocess.run(["cp", "-r", both.sim / "whole", root], check=True)
    (root / "params.yaml").write_bytes((both.sim / "ppo/params.yaml").read_bytes())
    process = start(root, "ppo", 2, PYTHONPATH=str(HOOK))
    said = process.communicate(timeout=120)[1]
    assert process.returncode == EXIT_DONE, said
    for ours, theirs in zip(figures(root, "ppo"), figures(both.sim / "ppo", "ppo"), strict=True):
        for name in ("score", "kl", "entropy", "policy_loss", "grad_norm"):
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-4, abs_tol=1e-5), name
    assert_same_models(root, both.sim / "ppo", "ppo")


def test_the_plan_has_the_memory_that_is_held(both: Both) -> None:
    """For sequences as long as these were. A plan reads all prompts at once, where the rollout reads those of like
    length together.
    """
    errors = {}
    for cell in CELLS:
        if cell.stage in SAMPLING_METHODS and cell.name not in OF_ANOTHER_SIZE:
            root = both.sim / cell.name.replace(" ", "-")
            rows = jsonl.read(root / "runs" / cell.stage / "usage.jsonl", UsageRow).rows
            for phase, planned in planned_bytes(root, cell.stage, rows).items():
                held = max(row.peak_bytes for row in rows if row.phase == phase)
                errors[cell.name, phase] = planned / held - 1
    assert len(errors) >= 40
    assert median(map(abs, errors.values())) < 0.03, errors
    assert min(errors.values()) > -0.05, errors
    assert max(errors.values()) < 0.13, errors
