"""Ports that nobody listens on."""

from tasks.servers.ports import free_port

__all__ = ["free_port"]
