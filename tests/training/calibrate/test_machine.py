"""Measuring the machine: the clock, the parts, one real stage of each kind."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
import yaml

from config.errors import EnvironmentFault
from config.workspace.machine import Machine, Passes, Stream
from tests.costs.machines import machine
from training.calibrate import rates as module
from training.calibrate.machine import check_quiet, device_memory, write
from training.calibrate.rates import (
    agreed,
    best_of,
    best_seconds,
    decode_step_seconds,
    generations,
    passes,
    samplings,
    streams,
)
from training.calibrate.stages import STAGES, stage_processes, write_trunks
from training.process.device import device


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and repetitions that take no time."""
    monkeypatch.setattr(module, "TRUNKS", ((32, 1, 2, 64, 1, 8), (256, 1, 2, 1024, 16, 64)))
    monkeypatch.setattr(module, "GENERATIONS", ((32, 1, 2, 64, 64, 4, 8, 3),))
    monkeypatch.setattr(module, "STREAM_BYTES", (2**14, 2**20))
    monkeypatch.setattr(module, "SAMPLINGS", ((4, 64, 64), (4, 200_000, 64)))


def test_a_call_takes_the_time_of_its_best_repetition_and_waiting_does_not_count() -> None:
    def work() -> None:
        time.sleep(0.01)  # another program has the core
        torch.ones(64, 64) @ torch.ones(64, 64)

    assert 0 < best_seconds(work, repetition_seconds=0.02) < 5e-3


def test_more_work_takes_longer() -> None:
    a, b = torch.randn(64, 64), torch.randn(512, 512)
    assert best_seconds(lambda: b @ b, 0.01) > 5 * best_seconds(lambda: a @ a, 0.01)


@pytest.mark.usefixtures("short")
def test_training_takes_longer_than_a_forward_pass_and_a_larger_trunk_longer_than_a_small_one() -> (
    None
):
    small, large = passes("cpu")
    assert small.training_seconds > small.forward_seconds > 0
    assert large.forward_seconds > small.forward_seconds


@pytest.mark.usefixtures("short")
def test_a_rollout_is_measured_to_its_full_length() -> None:
    [found] = generations("cpu")
    assert found.new_tokens == 3
    assert found.seconds > 2 * decode_step_seconds("cpu") / 4


@pytest.mark.usefixtures("short")
def test_a_larger_vocabulary_takes_longer_to_draw_from() -> None:
    small, large = samplings("cpu")
    assert (small.vocab, large.vocab) == (64, 200_000)
    assert large.product_seconds > 2 * small.product_seconds > 0
    assert large.draw_seconds > small.draw_seconds > 0


@pytest.mark.usefixtures("short")
def test_additions_of_two_sizes_are_timed() -> None:
    assert [each.bytes for each in streams("cpu")] == [2**14, 2**20]
    assert all(each.bytes_per_second > 1e8 for each in streams("cpu"))


def test_the_better_of_two_rounds_is_taken_figure_by_figure() -> None:
    trunk = {"width": 8, "layers": 1, "heads": 1, "mlp_width": 8, "sequences": 1, "tokens": 8}
    first = {
        "streams": (Stream(bytes=8, bytes_per_second=5.0),),
        "passes": (Passes(**trunk, forward_seconds=2.0, training_seconds=5.0),),
    }
    second = {
        "streams": (Stream(bytes=8, bytes_per_second=6.0),),
        "passes": (Passes(**trunk, forward_seconds=1.0, training_seconds=7.0),),
    }
    best = best_of(first, second)
    assert best["streams"] == second["streams"]
    assert best["passes"] == (Passes(**trunk, forward_seconds=1.0, training_seconds=5.0),)


def rounds(
    slower: float, of: int
) -> tuple[dict[str, tuple[Stream, ...]], dict[str, tuple[Stream, ...]]]:
    """Two rounds of five figures, `of` of them slower in the second."""
    speeds = [5.0, 6.0, 7.0, 8.0, 9.0]
    return tuple(  # type: ignore[return-value]
        {
            "streams": tuple(
                Stream(bytes=8, bytes_per_second=s / (factor if i < of else 1.0))
                for i, s in enumerate(speeds)
            )
        }
        for factor in (1.0, slower)
    )


def test_rounds_that_disagree_are_refused_and_one_slow_figure_is_not() -> None:
    for first, second in (rounds(1.2, of=5), rounds(10.0, of=2)):
        assert agreed(first, second) == agreed(second, first) == first
    for slow in (rounds(1.5, of=5), rounds(1.5, of=5)[::-1]):
        with pytest.raises(EnvironmentFault, match=r"1\.50 times apart .* the machine is busy"):
            agreed(*slow)


@pytest.mark.parametrize(
    ("other_cores", "cores", "threads", "quiet"),
    [
        (0.1, 2, 2, True),
        (1.5, 2, 2, False),
        (1.0, 2, 1, True),
        (1.5, 2, 1, False),
        (60.0, 64, 2, True),
    ],
)
def test_a_machine_whose_cores_others_use_is_not_measured(
    other_cores: float, cores: int, threads: int, quiet: bool
) -> None:
    with (
        contextlib.nullcontext()
        if quiet
        else pytest.raises(EnvironmentFault, match="the machine is busy")
    ):
        check_quiet(other_cores, cores, threads)


def test_memory_is_what_the_machine_has() -> None:
    name, memory, usable = device_memory("cpu")
    assert name == "cpu"
    assert 2**28 < usable <= memory


def test_what_was_written_is_read_back_whole(tmp_path: Path) -> None:
    path = tmp_path / ".rlhf" / "hardware.yaml"
    write(machine(), path)
    write(machine(threads=2), path)
    assert Machine.model_validate(yaml.safe_load(path.read_text())) == machine(threads=2)
    assert [file.name for file in path.parent.iterdir()] == ["hardware.yaml"]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_trunks_are_timed_on_the_device_that_stages_have(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    found = torch.device("cuda") if has_gpu else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(module, "passes", lambda device, _: seen.append(device) or ())
    monkeypatch.chdir(tmp_path)
    write_trunks()
    assert seen == [device().type] == ["cuda" if has_gpu else "cpu"]


@pytest.mark.slow
def test_a_stage_of_each_kind_is_started_and_timed(tmp_path: Path) -> None:
    found = stage_processes(tmp_path)
    assert set(found) == set(STAGES)
    for stage in found.values():
        assert stage.start_seconds > stage.imports_seconds * 0.8 > 0
        assert 0 < stage.step_seconds < stage.start_seconds
        assert 2**28 < stage.after_imports_bytes < 2**31
