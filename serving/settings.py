"""Where a front listens, and how its engines are started."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from config.workspace.login import LOCAL_NAMES

EngineName = Literal["llama_cpp", "vllm"]
Weights = Literal["f32", "q8_0", "q4_0"]
QUEUE = 64
"""Requests that may wait for a slot."""


class Address(NamedTuple):
    """The address of a front, and how clients may call it."""

    port: int
    listen: str = "127.0.0.1"
    also: tuple[str, ...] = ()
    """Accepted Host headers besides localhost:PORT and 127.0.0.1:PORT."""

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset((*(f"{name}:{self.port}" for name in LOCAL_NAMES), *self.also))


class Challenger(NamedTuple):
    """A second model behind a front."""

    wanted: Callable[[], Path]
    """The export to serve."""
    share: float
    """Of the conversations, those that it answers; 0 to 1."""
    compares: bool
    """Whether a request with `n: 2` gets a reply of each model."""


class Settings(NamedTuple):
    """How engines are started."""

    engine: EngineName
    weights: Weights
    """The GGUF file that llama.cpp loads."""
    slots: int
    """Replies generated in parallel."""
    threads: int
    """Threads of llama.cpp."""
    arguments: tuple[str, ...] = ()
    """Further ones of `vllm serve`."""
