"""Common part of tests of the server below the API: raw connections, and the check that the server has survived."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.kits.target import Target
from tests.kits.waiting import PATIENCE

__all__ = ["HEAD", "connected", "connections", "read_all", "statuses", "unharmed"]

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: user-key\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(target: Target) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        yield connection


def connections(target: Target, ports: set[int]) -> int:
    """Connections from these ports that the server holds: those of an earlier test may end at any time. Not its open
    files: its event loop may open some at any time.
    """
    own = psutil.Process(target.server.process.pid).net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port in ports for each in own)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
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
