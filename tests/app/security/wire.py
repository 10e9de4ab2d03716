"""What the tests of the server below the API share: connections by hand, and a server that lived through it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.app.security.conftest import Target
from tests.waiting import PATIENCE

__all__ = ["HEAD", "connected", "read_all", "statuses", "unharmed"]

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: user-key\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(target: Target) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "target" in request.fixturenames:
        target = request.getfixturevalue("target")
        assert target.client.get("/health").status_code == 200
        target.assert_unharmed()
