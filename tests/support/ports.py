"""Ports that nobody listens on."""

from tasks.servers.processes import free_port

__all__ = ["free_port"]
