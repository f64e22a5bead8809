"""Publishes a comparison: the page, and MLflow."""

import logging
from pathlib import Path

from config.errors import EnvironmentFault
from config.schema import Params
from config.workspace.levers import FOLDER, Levers
from reporting.levers_page import write_levers_page
from tasks.levers.study import CHEAPEST
from tracking.levers import log_levers

logger = logging.getLogger(__name__)


def publish(root: Path, params: Params, found: Levers) -> Path:
    """Write the page and log the comparison to MLflow, which may be away; returns the page."""
    page = write_levers_page(root)
    try:
        log_levers(root, params, found, [page, root / FOLDER / CHEAPEST])
    except EnvironmentFault as fault:
        logger.warning("%s", fault)
    return page
