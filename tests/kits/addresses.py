"""Reserves addresses for servers and ranks before they listen there."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

__all__ = ["held_address", "hold_port", "hold_two_ports", "port_of"]


def hold_port(number: int = 0) -> socket.socket:
    """Bind a free port of 127.0.0.1, or this one, which stays reserved until it is closed. Servers that set
    SO_REUSEADDR may listen there meanwhile.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", number))
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


@contextmanager
def hold_two_ports() -> Iterator[int]:
    """The first of two free ports in a row, both reserved until the end of the context."""
    with ExitStack() as tried:
        while True:
            first = tried.enter_context(hold_port())
            with suppress(OSError, OverflowError):
                tried.enter_context(hold_port(port_of(first) + 1))
                break
        yield port_of(first)


@contextmanager
def held_address() -> Iterator[str]:
    """A free host:port, reserved until the end of the context."""
    with hold_port() as held:
        yield f"127.0.0.1:{port_of(held)}"
