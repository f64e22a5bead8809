"""Downloads from URLs in params: bounded in size, and never from addresses where clouds serve credentials.

Redirects and host names that resolve to such an address are refused too; the address checked is the one connected to.
"""

import errno
import http.client
import ipaddress
import shutil
import socket
import ssl
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from typing import IO, Any

from config.errors import DataError, EnvironmentFault
from config.urls import unreadable, with_secrets, without_secrets

TIMEOUT_SECONDS = 60
MAX_BYTES = 4 * 2**30
"""Most bytes per source."""
CHUNK_BYTES = 2**20
MAX_REASON_CHARS = 300
METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::/32",
        "fd20:ce::/32",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
    )
)
"""Addresses where clouds serve credentials: all link-local ones, and others used by AWS, Google, Alibaba, Azure and
Oracle.
"""

NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(Exception):
    """A refused request or answer; the text says why."""


def download(url: str, setting: str, target: IO[bytes], max_bytes: int | None = None) -> None:
    """Write the content of a URL to a file: http(s) by the standard library, stores (s3, gs, hf ...) by fsspec and its
    plugins.

    `setting` names the source in messages, such as data.source. Raises DataError, EnvironmentFault if it names a
    variable that is not set.
    """
    most = MAX_BYTES if max_bytes is None else max_bytes
    place = with_secrets(url)
    reason = unreadable(place)
    if reason is not None:
        raise DataError(f"{setting}.path={url} {reason}, in params.yaml.")
    try:
        if urllib.parse.urlsplit(place).scheme.lower() in ("http", "https"):
            with _opener().open(place, timeout=TIMEOUT_SECONDS) as response:
                _copy(response, target, most, int(response.headers.get("Content-Length") or 0))
            return
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(place, "rb") as file:
            _copy(file, target, most, 0)
        return
    except EnvironmentFault:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"HTTP {error.code}" + (
            f" {error.reason}" if error.code >= HTTPStatus.BAD_REQUEST else ", to where nothing is read"
        )
    except Exception as error:  # every transport has exceptions of its own
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise no_room(url) from error
        reason = str(error) or type(error).__name__
    reason = " ".join(without_secrets(reason).split()).rstrip(".")[:MAX_REASON_CHARS]
    raise DataError(f"{url} cannot be read: {reason}. Try again later, or fix {setting}.path in params.yaml.")


def no_room(place: str) -> EnvironmentFault:
    """What to say where a source does not fit on the disk of temporary files."""
    folder = tempfile.gettempdir()
    return EnvironmentFault(
        f"{place} is larger than what {folder} has to spare ({shutil.disk_usage(folder).free / 2**30:.1f} GiB are "
        "free). Free some space there, or set TMPDIR to a folder on a larger disk."
    )


def _copy(file: IO[bytes], target: IO[bytes], most: int, announced: int) -> None:
    size = 0
    while max(size, announced) <= most:
        chunk = file.read(CHUNK_BYTES)
        if not chunk:
            if size < announced:
                raise Refused(f"it ended after {size} of {announced} bytes")
            return
        target.write(chunk)
        size += len(chunk)
    raise Refused(
        f"it is larger than {most} bytes, the most that is read from a URL (MAX_BYTES in "
        "training/preparation/download.py)"
    )


def _opener() -> urllib.request.OpenerDirector:
    """Only http and https: the default opener also reads files and ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Targets(),
        urllib.request.ProxyHandler(),
        _Http(),
        _Https(context=ssl.create_default_context()),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _require_allowed(host: str, address: str) -> None:
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        low = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        inner += [ip.ipv4_mapped or ip, low if ip in NAT64 else ip, ip.sixtofour or ip]
    if any(address in network for address in inner for network in METADATA):
        raise Refused(f"{host} is the address {ip}, where clouds tell a machine its credentials")


def _addresses(host: str, port: int) -> list[str]:
    if ":" in host:  # an IPv6 address that this machine's resolver refuses
        return [host]
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def _connect(address: tuple[str, int], timeout: float | None = None, source_address: Any = None) -> socket.socket:
    """A connection to the first address of a host that answers; all are checked first."""
    host, port = address
    addresses = _addresses(host, port)
    for candidate in addresses:
        _require_allowed(host, candidate)
    for candidate in addresses[:-1]:
        try:
            return socket.create_connection((candidate, port), timeout, source_address)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout, source_address)


class _Connection(http.client.HTTPConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._create_connection = _connect


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._create_connection = _connect


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req, context=self._context)  # type: ignore[attr-defined]


class _Targets(urllib.request.BaseHandler):
    """Checks the host of every request, redirected ones too: behind a proxy the connection goes to the proxy."""

    handler_order = 100

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        parts = urllib.parse.urlsplit(request.full_url)
        host = parts.hostname or ""
        try:
            addresses = _addresses(host, parts.port or 80)
        except OSError:  # perhaps only the proxy can resolve it; otherwise the connection fails
            return request
        for address in addresses:
            _require_allowed(host, address)
        return request

    https_request = http_request


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http(s) only, never from https to http. The target is not shown: it may be signed."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = (urllib.parse.urlsplit(url).scheme.lower() for url in (req.full_url, newurl))
        if after not in ("http", "https") or (before, after) == ("https", "http"):
            raise Refused(f"it redirects from {before} to {after}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
