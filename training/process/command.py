"""Entry point of processes that are not stages: quiet libraries, errors in one line, an exit code."""

import logging
from collections.abc import Callable

import transformers

from config.errors import EXIT_DONE, RlhfError
from training.process import garbage_collection

logger = logging.getLogger(__name__)


def run_command(work: Callable[[], None], name: str = "", level: int = logging.INFO) -> int:
    """Run `work` and return the exit code; `name` prefixes its error line."""
    garbage_collection.begin_work()
    logging.basicConfig(level=level, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        work()
    except RlhfError as error:
        logger.error("%s%s", name and f"{name}: ", error)
        return error.exit_code
    return EXIT_DONE
