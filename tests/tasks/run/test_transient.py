"""Faults that pass and faults that do not, on what the libraries really raise."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)
from dvc.exceptions import CheckoutError, DownloadError, DvcException, UploadError

from config.errors import EnvironmentFault
from tasks.run import transient
from tasks.run.store import Store
from tasks.run.transient import Kind, TransientFault, UnknownFault, fault, kind_of, persist


def by_s3(status: int) -> Exception:
    return ClientError({"ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "transient"),
        (TimeoutError(), "transient"),
        (OSError(errno.EBUSY, "Please reduce your request rate."), "transient"),
        (OSError(errno.EREMOTEIO, "We encountered an internal error."), "transient"),
        (OSError(errno.ENOSPC, "No space left on device"), "mistake"),
        (PermissionError("Access Denied"), "mistake"),
        (FileNotFoundError("The specified bucket does not exist"), "mistake"),
        (OSError(errno.EINVAL, "The specified bucket is not valid."), "unknown"),
        (KeyError("md5"), "unknown"),
        (NoCredentialsError(), "mistake"),
        (ConnectionClosedError(endpoint_url="s3"), "transient"),
        (aiohttp.ClientPayloadError("cut off"), "transient"),
        (by_s3(503), "transient"),
        (by_s3(403), "mistake"),
    ],
)
def test_what_libraries_raise(error: Exception, kind: Kind) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ((DownloadError(2), EndpointConnectionError(endpoint_url="s3")), "transient"),
        ((EndpointConnectionError(endpoint_url="s3"), PermissionError("Forbidden")), "mistake"),
        ((CheckoutError(["models/sft"], {}),), "mistake"),
        ((UploadError(1),), "unknown"),
    ],
)
def test_what_dvc_met(errors: tuple[Exception, ...], kind: Kind) -> None:
    assert kind_of(*errors) == kind


def test_the_reason_behind_an_error_counts() -> None:
    error = DvcException("failed to read the remote")
    error.__cause__ = ReadTimeoutError(endpoint_url="s3")
    assert kind_of(error) == "transient"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_has_its_exception(kind: Kind) -> None:
    expected = {"transient": TransientFault, "mistake": EnvironmentFault, "unknown": UnknownFault}
    assert type(fault(kind, "met")) is expected[kind]


def test_a_store_that_is_away_passes_and_a_missing_bucket_does_not(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault) as missing:
        Store("s3://nowhere/dvc").upload(Path(__file__).parent, "x", "")
    assert not isinstance(missing.value, TransientFault)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setitem(os.environ, "AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TransientFault):
        Store("s3://store/dvc").upload(Path(__file__).parent, "x", "")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds waited between tries, none of which pass."""
    waited: list[float] = []
    now = [0.0]
    monkeypatch.setattr(transient.random, "uniform", lambda low, high: 1.0)
    monkeypatch.setattr(transient.time, "monotonic", lambda: now[0])

    def wait(seconds: float, give_up: Callable[[], bool]) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(transient, "_wait", wait)
    return waited


def failing(times: int, error: Exception) -> Callable[[], str]:
    remaining = iter(range(times))

    def action() -> str:
        if next(remaining, None) is not None:
            raise error
        return "done"

    return action


def test_what_passes_is_tried_again_with_growing_waits_for_as_long_as_it_takes(waits: list[float]) -> None:
    assert persist(failing(100, TransientFault("away")), lambda: False) == "done"
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(waits) == 100


def test_what_does_not_pass_is_said_at_once_and_somebody_may_give_up(waits: list[float]) -> None:
    for error in (EnvironmentFault("no bucket"), UnknownFault("what?")):
        with pytest.raises(type(error)):
            persist(failing(1, error), lambda: False)
    with pytest.raises(TransientFault):
        persist(failing(1, TransientFault("away")), lambda: True)
    assert persist(failing(0, TransientFault("away")), lambda: True) == "done", "it is tried once at least"
    assert waits == []
    with pytest.raises(TransientFault):
        persist(failing(100, TransientFault("away")), lambda: False, patience_seconds=10.0)
    assert waits == [1, 2, 4, 8]


def test_giving_up_does_not_wait_for_the_end_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transient, "FIRST_WAIT_SECONDS", 3600.0)
    answers = iter([False, False, True, True, True])
    with pytest.raises(TransientFault):
        persist(failing(9, TransientFault("away")), lambda: next(answers))
