"""Reserves addresses for servers and ranks before they listen there."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_address", "hold_port", "port_of"]


def hold_port() -> socket.socket:
    """Bind a free port of 127.0.0.1, which stays reserved until it is closed. Servers that set SO_REUSEADDR may listen
    there meanwhile.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


@contextmanager
def held_address() -> Iterator[str]:
    """A free host:port, reserved until the end of the context."""
    with hold_port() as held:
        yield f"127.0.0.1:{port_of(held)}"
