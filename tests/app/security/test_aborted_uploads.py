"""Clients that begin an upload and never end it: others are served meanwhile, and nothing is left of them."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable

import msgspec
import psutil
import pytest

from app.server.request_body import MAX_BODY
from app.server.upload_budget import LIMIT
from tests.kits.addresses import port_of
from tests.kits.http2_client import H2Client, open_upload
from tests.kits.raw_http import HEAD, connected, connections, unharmed
from tests.kits.target import ADMIN, CHAT, Target
from tests.kits.waiting import blocking_until

__all__ = ["unharmed"]

UPLOADS = 100
PART = 64 << 10  # bytes of each body that are sent


def upload(kind: str, connection: socket.socket) -> None:
    """Send the head of a large upload, and a part of its body."""
    if kind == "length":
        connection.sendall(HEAD.encode() + b"Content-Length: %d\r\n\r\n" % MAX_BODY + b" " * PART)
    elif kind == "chunks":
        connection.sendall(
            HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n%b\r\n" % (b" " * 1024) * 64
        )
    elif kind == "half a chunk":
        connection.sendall(HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % MAX_BODY + b" " * PART)
    else:
        client = H2Client(connection)
        for _ in range(10):
            client.h2.send_data(open_upload(client), b" " * 6000)
        client.flush()


def reset(connection: socket.socket) -> None:
    """Close without the usual end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("end", [reset, socket.socket.close], ids=["reset", "closed"])
@pytest.mark.parametrize("kind", ["length", "chunks", "half a chunk", "HTTP/2"])
def test_uploads_that_never_end_hinder_nobody(target: Target, kind: str, end: Callable[[socket.socket], None]) -> None:
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connected(target)) for _ in range(UPLOADS)]
        ports = set(map(port_of, uploads))
        for connection in uploads:
            upload(kind, connection)
        blocking_until(lambda: connections(target, ports) == UPLOADS, "the uploads are not there")
        answer = target.post("/v1/chat/completions", CHAT)  # while all of them hang
        assert answer.status_code == 200
        assert connections(target, ports) == UPLOADS
        for connection in uploads:
            end(connection)
    blocking_until(lambda: not connections(target, ports), "a connection is kept")


def test_memory_of_uploads_that_end_is_used_again(target: Target) -> None:
    """A round may leave free memory with the allocator; the next ones take it again."""
    sizes, ports = [], set[int]()
    for _ in range(10):
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                connection = stack.enter_context(connected(target))
                ports.add(port_of(connection))
                connection.sendall(HEAD.encode() + b"Content-Length: %d\r\n\r\n" % MAX_BODY + b" " * (MAX_BODY - 1))
            assert target.post("/v1/chat/completions", CHAT).status_code == 200
        blocking_until(lambda: not connections(target, ports), "a connection is kept")
        sizes.append(psutil.Process(target.server.process.pid).memory_info().rss)
    assert sizes[-1] < sizes[0] + 2 * 8 * MAX_BODY  # nine rounds that leak a quarter take more


def test_unfinished_uploads_of_one_key_leave_room_for_others(target: Target) -> None:
    head = HEAD.encode() + b"Content-Length: %d\r\n\r\n" % MAX_BODY
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connected(target)) for _ in range(24)]
        ports = set(map(port_of, uploads))
        for connection in uploads:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + b" " * (MAX_BODY - 1))

        def refused() -> list[socket.socket]:
            return [each for each in uploads if select.select([each], [], [], 0)[0]]

        more = len(uploads) - LIMIT // 2 // MAX_BODY
        blocking_until(lambda: len(refused()) >= more, "too few uploads are refused")
        assert target.post("/v1/chat/completions", CHAT).status_code == 200  # small: it needs no share
        assert len(refused()) == more
        assert all(each.recv(12) == b"HTTP/1.1 429" for each in refused())
        large = msgspec.json.encode(CHAT | {"user": "x"}) + b" " * (MAX_BODY - 1000)
        answer = target.post("/v1/chat/completions", large)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "too_many_uploads"
        headers = {"Content-Type": "application/json", **ADMIN}
        assert target.post("/v1/chat/completions", large, headers=headers).status_code == 200
    blocking_until(lambda: not connections(target, ports), "a connection is kept")
    assert target.post("/v1/chat/completions", large).status_code == 200
