"""Classifies faults of stores: transient ones, and mistakes that the user has to correct.

A TransientFault is tried again, with a growing wait and for as long as it takes; a mistake is reported at once. What
is known as neither is an UnknownFault: a stage that meets one has crashed, and is started again from its checkpoint as
often as any that crashes.
"""

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from config.errors import EnvironmentFault

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Seconds before the first retry; each wait is twice the previous one."""
LOOK_SECONDS = 0.5
"""Seconds between checks whether to give up."""

Kind = Literal["transient", "mistake", "unknown"]
Result = TypeVar("Result")

_PASSING_NUMBERS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.EREMOTEIO,
    errno.EPIPE,
    errno.ESTALE,
    errno.EINTR,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}
_MISTAKEN_NUMBERS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
}
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that pass after a while."""


class TransientFault(EnvironmentFault):
    """A store that temporarily does not answer."""


class UnknownFault(EnvironmentFault):
    """Neither known to be transient nor a known mistake."""


def kind_of(*errors: Exception) -> Kind:
    """Whether what libraries raised passes by itself: a mistake does not, whatever else failed."""
    kinds = {_kind(error) for error in errors}
    return "mistake" if "mistake" in kinds else "transient" if "transient" in kinds else "unknown"


def _kind(error: Exception) -> Kind:
    import aiohttp
    from botocore import exceptions as s3  # type: ignore[import-untyped]
    from dvc.exceptions import CheckoutError

    if isinstance(error, CheckoutError | s3.NoCredentialsError | s3.PartialCredentialsError):
        return "mistake"
    answer = getattr(error, "response", None)  # botocore's
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    if isinstance(status, int):
        return "transient" if status in _PASSING_STATUS else "mistake"
    if isinstance(error, PermissionError | FileNotFoundError):
        return "mistake"
    number = error.errno if isinstance(error, OSError) else None
    if number in _MISTAKEN_NUMBERS:
        return "mistake"
    passing = (
        *(ConnectionError, TimeoutError, EOFError),
        *(s3.HTTPClientError, s3.ConnectionError, s3.IncompleteReadError),
        *(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError),
    )
    if number in _PASSING_NUMBERS or isinstance(error, passing):
        return "transient"
    return _kind(error.__cause__) if isinstance(error.__cause__, Exception) else "unknown"


def fault(kind: Kind, message: str) -> EnvironmentFault:
    """The exception for a fault of this kind."""
    return {"transient": TransientFault, "mistake": EnvironmentFault, "unknown": UnknownFault}[kind](message)


def persist(
    action: Callable[[], Result], give_up: Callable[[], bool], patience_seconds: float | None = None
) -> Result:
    """What `action` returns, however long the store at its other end is away; it is tried once at least.

    Raises the TransientFault once `give_up` says so, or after `patience_seconds` if there is such a limit; any other
    fault at once.
    """
    began, wait_seconds = time.monotonic(), FIRST_WAIT_SECONDS
    while True:
        try:
            return action()
        except TransientFault as error:
            if give_up() or (patience_seconds is not None and time.monotonic() - began > patience_seconds):
                raise
            logger.warning("%s Trying again in %.0f s.", error, wait_seconds)
        # so that many clients do not return at once
        _wait(wait_seconds * random.uniform(0.8, 1.2), give_up)
        wait_seconds = min(2 * wait_seconds, LONGEST_WAIT_SECONDS)


def _wait(seconds: float, give_up: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not give_up():
        time.sleep(LOOK_SECONDS)
