"""How the two processes of a retrain cycle start and end: options in, a JSON file out, a mistake in one line."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from config.errors import EXIT_DONE, RlhfError

logger = logging.getLogger("training.retrain_helper")


@torch.no_grad()
def run_helper(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None]) -> int:
    """Do `work` with what the command line says, the folder of the champion and the file to write included; returns the exit code."""
    parser.add_argument("--champion", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        work(options)
    except RlhfError as error:
        logger.error("%s", error)
        return error.exit_code
    return EXIT_DONE
