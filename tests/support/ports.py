"""Ports that nobody listens on."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
