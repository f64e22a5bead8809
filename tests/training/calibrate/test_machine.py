"""Measuring the machine: the clock, its memory, its best rates."""

import time

import torch

from training.calibrate.machine import best_seconds, device_memory, product_rate


def test_a_call_takes_the_time_of_the_fastest() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        time.sleep(0.05 if len(calls) % 2 else 0.001)  # every other time a program has the core

    assert 0.001 <= best_seconds(work) < 0.04


def test_small_products_reach_less_than_large_ones() -> None:
    small, large = (product_rate("fp32", torch.device("cpu"), width) for width in (8, 512))
    assert 1e7 < small < large


def test_memory_is_what_the_machine_has() -> None:
    name, memory, usable = device_memory(torch.device("cpu"))
    assert name == "cpu"
    assert 2**28 < usable <= memory
