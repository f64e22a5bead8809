"""Ports of the loopback address."""

import os
import socket

HOST = "127.0.0.1"
LOCAL = (HOST, "localhost", "::1")


def spare_proxy_for_local_servers() -> None:
    """Have this process and those that it starts ask servers of this machine directly, whatever proxy the environment
    names for others.
    """
    variables = ("NO_PROXY", "no_proxy")
    named = [part for name in variables for part in os.environ.get(name, "").split(",") if part]
    os.environ |= dict.fromkeys(variables, ",".join(dict.fromkeys([*named, *LOCAL])))


def is_port_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
