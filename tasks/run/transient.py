"""Classifies faults of stores and servers: transient ones, and mistakes that the user has to
correct.

A TransientFault is tried again, with a growing wait and for as long as it takes; a mistake is
reported at once. What is known as neither is an UnknownFault: a stage that meets one has crashed,
and is started again from its checkpoint as often as any that crashes.
"""

import errno
import logging
import random
import re
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

_PASSING_ERRORS = {
    "EndpointConnectionError",
    "HTTPClientError",
    "ConnectionError",
    "TimeoutError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
    "ResponseStreamingError",
    "IncompleteReadError",
}
"""Names of classes, and of their bases, in botocore, aiohttp, httpx and Python itself."""
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
_MISTAKES = re.compile(
    r"does not exist|NoSuchKey|NoSuchBucket|No such file|Forbidden|\(403\)|Access "
    r"?Denied|Permission denied|credentials"
    r"|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|token .*expired|No space left|Disk "
    r"quota|Read-only file system|Not a directory"
    r"|File exists",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"could not connect|failed to connect|connection|timed? ?out|name resolution|name or service "
    r"not known|slow ?down|request rate|throttl"
    r"|service ?unavailable|internal ?error|internal server error|bad "
    r"gateway|\(50\d\)|\(429\)|broken pipe|disconnected"
    r"|input/output error|stale file|busy",
    re.IGNORECASE,
)
"""DVC's error messages: it passes on only text."""
_ABSENT = re.compile(
    r"checkout failed|missing cache|no output or stage|did not find", re.IGNORECASE
)
"""What DVC says at its end, of data that exists nowhere as of data that it could not reach."""
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""Of an answer by HTTP."""


class TransientFault(EnvironmentFault):
    """A store or a server that temporarily does not answer."""


class UnknownFault(EnvironmentFault):
    """Neither known to be transient nor a known mistake."""


def kind_of(error: BaseException | str) -> Kind:
    """Whether what a library raised, or what a command printed, passes by itself."""
    if isinstance(error, str):
        if _MISTAKES.search(error):
            return "mistake"
        return (
            "transient" if _PASSING.search(error) else "mistake" if lacks_data(error) else "unknown"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return "transient" if status in _PASSING_STATUS else "mistake"
    number = error.errno if isinstance(error, OSError) else None
    if number in _MISTAKEN_NUMBERS or isinstance(error, PermissionError | FileNotFoundError):
        return "mistake"
    if number in _PASSING_NUMBERS or any(
        kind.__name__ in _PASSING_ERRORS for kind in type(error).__mro__
    ):
        return "transient"
    return "unknown" if number is not None else kind_of(str(error))


def lacks_data(message: str) -> bool:
    """Whether DVC ended because data exists nowhere, and named no other reason."""
    return (
        bool(_ABSENT.search(message))
        and not _MISTAKES.search(message)
        and not _PASSING.search(message)
    )


def fault(kind: Kind, message: str) -> EnvironmentFault:
    """The exception for a fault of this kind."""
    return {"transient": TransientFault, "mistake": EnvironmentFault, "unknown": UnknownFault}[
        kind
    ](message)


def persist(
    action: Callable[[], Result], give_up: Callable[[], bool], patience_seconds: float | None = None
) -> Result:
    """What `action` returns, however long the store at its other end is away; it is tried once at
    least.

    Raises the TransientFault once `give_up` says so, or after `patience_seconds` if there is such a
    limit; any other fault at once.
    """
    began, wait_seconds = time.monotonic(), FIRST_WAIT_SECONDS
    while True:
        try:
            return action()
        except TransientFault as met:
            if give_up() or (
                patience_seconds is not None and time.monotonic() - began > patience_seconds
            ):
                raise
            logger.warning("%s Trying again in %.0f s.", met, wait_seconds)
        # so that many clients do not return at once
        _wait(wait_seconds * random.uniform(0.8, 1.2), give_up)
        wait_seconds = min(2 * wait_seconds, LONGEST_WAIT_SECONDS)


def _wait(seconds: float, give_up: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not give_up():
        time.sleep(LOOK_SECONDS)
