"""Every alignment method by name, found as the modules of config/methods that have a METHOD."""

from importlib import import_module
from pkgutil import iter_modules

import config.methods
from config.methods.method import Method


def _find() -> dict[str, Method]:
    names = {module.name for module in iter_modules(config.methods.__path__)} - {"registry"}
    modules = {name: import_module(f"config.methods.{name}") for name in names}
    methods = {name: module.METHOD for name, module in modules.items() if hasattr(module, "METHOD")}
    return dict(sorted(methods.items(), key=lambda item: item[1].arxiv))


RECORDS: dict[str, Method] = _find()
METHODS = tuple(RECORDS)
"""The alignment stages; a run has the one that align.method names."""
SAMPLING_METHODS = tuple(name for name, method in RECORDS.items() if method.samples)
"""Alignment stages that train on responses they sample, all in the loop of training/ppo.py."""

OFFLINE_METHODS = tuple(name for name, method in RECORDS.items() if not method.samples)
"""Alignment stages that train on prepared replies, one file each in training/."""


def stage_module(stage: str) -> str:
    """The module of a stage's process, `python -m <module> <stage>`. Its work is the function by the module's name."""
    return "training.ppo" if stage in SAMPLING_METHODS else f"training.{stage}"
