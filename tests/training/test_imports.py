"""What a stage's process imports before it works: seconds and memory that every start pays."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("training.ppo", {"torch._inductor.compile_fx", "datasets", "pandas", "trl"}),
        ("training.evaluate", {"torch._inductor.compile_fx", "datasets", "pandas", "trl"}),
        ("training.sft", {"torch._inductor.compile_fx"}),
        ("training.data", {"peft", "trl", "datasets", "pandas"}),
    ],
)
def test_a_stage_imports_no_package_that_it_does_not_use(module: str, unneeded: set[str]) -> None:
    show = f"import {module}, sys; print(*sys.modules)"
    imported = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "torch" in imported
    assert not unneeded & set(imported)
