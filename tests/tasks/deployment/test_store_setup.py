"""The certificate of the store's parts: good for both ends of a call, and renewed in time."""

import os
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.deployment.store_setup import RENEWED_BEFORE, VALID, set_up


@pytest.fixture
def private(tmp_path: Path) -> Path:
    result = tmp_path / "private"
    result.mkdir()
    return result


def written(private: Path, now: datetime) -> tuple[bytes, bytes]:
    set_up(private.parent, private, os.getuid(), now)
    return (private / "cert.pem").read_bytes(), (private / "key.pem").read_bytes()


def said(private: Path, *, with_certificate: bool) -> bytes:
    """What a server that asks for the certificate answers to a client."""
    certificate, key = private / "cert.pem", private / "key.pem"
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(certificate)
    server.load_cert_chain(certificate, key)
    if with_certificate:
        client.load_cert_chain(certificate, key)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as result:
                result.sendall(b"welcome")
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours) as result:
            return result.recv(10)
    finally:
        thread.join()


def test_who_has_the_certificate_is_answered_and_nobody_else(private: Path) -> None:
    written(private, datetime.now(UTC))
    assert said(private, with_certificate=True) == b"welcome"
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        said(private, with_certificate=False)


def test_it_stays_until_the_year_before_it_ends(private: Path) -> None:
    now = datetime.now(UTC)
    first = written(private, now)
    late = now + VALID - RENEWED_BEFORE
    assert written(private, late - timedelta(days=1)) == first
    renewed = written(private, late + timedelta(days=1))
    assert renewed[0] != first[0]
    assert renewed[1] != first[1]


def test_a_damaged_one_is_made_anew_and_only_the_owner_reads_it(private: Path) -> None:
    written(private, datetime.now(UTC))
    (private / "cert.pem").write_text("half")
    written(private, datetime.now(UTC))
    assert said(private, with_certificate=True) == b"welcome"
    assert {path.stat().st_mode & 0o777 for path in private.iterdir()} == {0o600}
    assert private.stat().st_mode & 0o777 == 0o700
