"""The command that measures a GPU, where there is none."""

import pytest
import torch

from benchmarks import gpu_report
from config.compose import compose
from config.load import read, validate


def test_params_of_every_cell_are_valid() -> None:
    first, then = gpu_report.matrix()
    for recipe, cells in (
        (gpu_report.TINY, first + then),
        (gpu_report.SPEED, gpu_report.speed_cells("0.5B", batch=64, new_tokens=32)),
    ):
        for cell in cells:
            validate(compose(read(recipe), {}, list(cell.overrides)), cell.name)


def test_without_an_accelerator_it_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu_report.main()
    assert end.value.code == 2
    assert "No accelerator here" in capsys.readouterr().err
