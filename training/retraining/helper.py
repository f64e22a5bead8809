"""Entry point of both processes of a retrain cycle: options in, a JSON file out, errors in one line."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from training.process.command import run_command


@torch.no_grad()
def run_helper(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None]) -> int:
    """Run `work` with the command line's options, which include the champion's folder and the output file; returns the
    exit code.
    """
    parser.add_argument("--champion", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return run_command(lambda: work(options), level=logging.WARNING)
