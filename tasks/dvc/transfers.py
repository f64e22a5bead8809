"""Outputs between this project and DVC's default remote: pushing them, fetching what is missing."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from config.dvc_stages import dvc_name
from config.errors import EnvironmentFault
from tasks.dvc.lock_digests import is_locked_content
from tasks.dvc.origins import exchange_records
from tasks.dvc.status import one_line
from tasks.run.run import STATE_FOLDER
from tasks.run.transient import fault, kind_of

LOGGERS = ("dvc", "dvc_data", "dvc_objects")
BARS = ("dvc.progress", "dvc_data.callbacks")
"""Loggers whose level decides whether DVC draws progress bars."""


def transfer(root: Path, action: Callable[[Any], object]) -> list[Exception]:
    """Have DVC's Repo at `root` do `action`; returns the errors that it met, empty if all went well.

    DVC logs what stopped each file, and raises only that some failed.
    """
    from dvc.repo import Repo

    with chdir(root), quiet() as errors:  # DVC takes targets from the working directory
        try:
            with Repo(str(root)) as repo:
                action(repo)
        except Exception as error:  # noqa: BLE001 -- whatever the file system of a remote raises
            errors.append(error)
            return errors
    return []


@contextmanager
def quiet() -> Iterator[list[Exception]]:
    """The exceptions that DVC logs meanwhile; nothing of it is printed."""
    errors: list[Exception] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and isinstance(record.exc_info[1], Exception):
                errors.append(record.exc_info[1])

    for name in BARS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    printing = [logger.handlers for logger in loggers]
    for logger in loggers:
        logger.handlers = [Collector(logging.ERROR)]
    try:
        yield errors
    finally:
        for logger, handlers in zip(loggers, printing, strict=True):
            logger.handlers = handlers


def reason(errors: Sequence[Exception]) -> str:
    """One line on what stopped a transfer."""
    from dvc.exceptions import CheckoutError

    first = errors[0]
    if isinstance(first, CheckoutError):
        return f"the remote does not have {', '.join(map(str, first.target_infos))}."
    return one_line(first)


def check_out(root: Path, stages: Sequence[str] | None = None) -> list[Exception]:
    """Put the outputs of dvc.lock in place, from DVC's cache or else its remote; returns what stopped that.

    stages  DVC's names; None takes all. Outputs of named stages are replaced whatever they hold.
    """

    def checkout() -> list[Exception]:
        return transfer(root, lambda repo: repo.checkout(stages, force=stages is not None))

    errors = checkout()
    if errors and default_remote(root) is not None:
        fetching = transfer(root, lambda repo: repo.fetch(stages))
        errors = [*fetching, *errors] if (errors := checkout()) else []
    return errors


def is_absent(errors: Sequence[Exception]) -> bool:
    """Whether a checkout failed for nothing but data that exists nowhere."""
    from dvc.exceptions import CheckoutError

    return all(isinstance(error, CheckoutError) for error in errors)


def push(root: Path, stage: str | None = None) -> str | None:
    """Like `send_outputs`, but returns the reason for a failure in one line; None if all is there or there is no
    remote.
    """
    try:
        send_outputs(root, stage)
    except EnvironmentFault as error:
        return str(error)
    return None


def send_outputs(root: Path, stage: str | None = None) -> None:
    """Push new outputs (of `stage`, or all) to the default remote, if there is one, without a time limit.

    Pushes are remembered by the digest of dvc.lock and by the remote, so that an unchanged run makes no request.
    Raises TransientFault, EnvironmentFault or UnknownFault: see tasks/run/transient.py.
    """
    lock, marker = root / "dvc.lock", root / STATE_FOLDER / "pushed"
    if not lock.exists() or default_remote(root) is None:
        return
    if marker.exists() and marker.read_text() == _pushed(root):
        return
    targets = [dvc_name(stage)] if stage else None
    if errors := transfer(root, lambda repo: repo.push(targets)):
        raise fault(
            kind_of(*errors),
            f"dvc push failed: {reason(errors)} The run is complete here; run dvc push to send its "
            "outputs to the remote.",
        )
    if stage is None:
        if errors := transfer(root, lambda repo: exchange_records(repo, root, send=True)):
            raise fault(kind_of(*errors), f"the remote did not take what this run has made: {reason(errors)}")
        note_pushed(root)


def note_pushed(root: Path) -> None:
    """Remember that everything in dvc.lock is in the default remote."""
    marker = root / STATE_FOLDER / "pushed"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text(_pushed(root))


def _pushed(root: Path) -> str:
    """Names a dvc.lock and the remote that has its outputs: its address, and the store that this address is of."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    remote = config["remote"][config["core"]["remote"]]
    where = [str(remote["url"]), str(remote.get("endpointurl") or os.environ.get("AWS_ENDPOINT_URL", ""))]
    return hashlib.sha256(json.dumps(where).encode() + (root / "dvc.lock").read_bytes()).hexdigest()


def fetch(root: Path, paths: Sequence[str]) -> None:
    """Fetch outputs that are missing or differ from dvc.lock, replacing older ones.

    Raises TransientFault, EnvironmentFault or UnknownFault if the remote does not give it: see tasks/run/transient.py.
    """
    missing = _not_as_locked(root, paths)
    if not missing:
        return

    def pull(repo: Any) -> None:
        repo.pull(missing, force=True)

    errors = transfer(root, pull)
    if errors and is_absent(errors):
        # another container that shares the cache may have been writing there: DVC removes a file for a moment to test
        # whether the disk can clone it
        errors = transfer(root, pull)
    if errors:
        raise fault(
            kind_of(*errors),
            f"{', '.join(missing)} could not be fetched from the DVC remote "
            f"{public(default_remote(root))}: {reason(errors)}",
        )


def _not_as_locked(root: Path, paths: Sequence[str]) -> list[str]:
    from dvc.repo import Repo

    if not paths:
        return []
    with Repo(str(root)) as repo:
        return [path for path in paths if not is_locked_content(repo, str(root.resolve() / path))]


def default_remote(root: Path) -> str | None:
    """URL of the default remote, None if there is none."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    name = config["core"].get("remote")
    return str(config["remote"][name]["url"]) if name in config["remote"] else None


def public(url: str | None) -> str | None:
    """An address that may be shown and kept: without user or password."""
    return url and re.sub(r"://[^/]*@", "://***@", url)
