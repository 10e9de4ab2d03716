"""Addresses at which ranks can meet."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_address"]


@contextmanager
def held_address() -> Iterator[str]:
    """A free host:port, bound until the end: nobody else is given it, and who shares addresses may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
