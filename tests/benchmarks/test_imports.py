"""Benchmarks are run seldom; that they still go with the code is checked here."""

import importlib
from pathlib import Path

import pytest

from tests.conftest import ROOT

WITH_OLD_TRL = ("benchmarks.record_trl_fixture", "benchmarks.trl_comparison.trl_side")
"""They need the last version of TRL that has PPO."""
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if "projects" not in path.parts
]


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_imported(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # warnings are errors here
    if module in WITH_OLD_TRL:
        with pytest.raises(ModuleNotFoundError, match=r"trl.experimental.ppo"):
            importlib.import_module(module)
    else:
        assert Path(str(importlib.import_module(module).__file__)).is_relative_to(ROOT)
