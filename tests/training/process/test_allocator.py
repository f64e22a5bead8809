"""In processes of their own: how the C library's heap is set up cannot be undone."""

import subprocess
import sys
from pathlib import Path

import pytest

from training.process import allocator

ROOT = Path(__file__).parents[3]
MIB = 2**20
PLACE = """
import psutil, training, torch
from training.process import allocator
if {settled}:
    allocator.configure()
def held():
    return psutil.Process().memory_info().rss
torch.ones(2**22)  # freed: glibc raises its limit to these 16 MiB
"""

pytestmark = pytest.mark.skipif(
    allocator._c_function("mallinfo2") is None, reason="this C library is not glibc 2.33 or newer"
)


def said(code: str, settled: bool) -> list[float]:
    """What a fresh process prints, in MiB."""
    result = PLACE.format(settled=settled) + code
    run = subprocess.run(
        [sys.executable, "-c", result], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return [float(number) / MIB for number in run.stdout.split()]


@pytest.mark.parametrize("settled", [False, True])
def test_a_large_tensor_goes_back_to_the_system_when_it_is_freed(settled: bool) -> None:
    # eight tensors of 8 MiB with small ones between: in a heap the holes they leave stay
    code = """
before = held()
kept = [(torch.ones(2**21), torch.ones(2**12)) for _ in range(8)]
kept = [small for _, small in kept]
print(held() - before)
"""
    (remaining,) = said(code, settled)
    assert remaining < 4 if settled else remaining > 32


def test_what_is_free_in_the_heap_is_given_back_between_phases_if_it_is_much() -> None:
    # every other tensor of 512 KiB, below the limit, is freed: wherever they lie, what is free is in pieces and the
    # heap's end is not
    code = """
living = []
def churn(tensors):
    made = [torch.ones(2**17) for _ in range(2 * tensors)]
    living.extend(made[::2])
before = held()
def beside_the_living():
    return held() - before - len(living) * 2**19
churn(16)
allocator.release_free_memory()
print(beside_the_living())
churn(128)
print(beside_the_living())
allocator.release_free_memory()
print(beside_the_living())
"""
    few, remaining, given_back = said(code, settled=True)
    assert few > 4
    assert remaining > 32  # what is worth giving back
    assert given_back < 6
