"""An HTTP/2 client whose frames a test writes one by one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

__all__ = ["H2Client", "open_upload"]


class H2Client:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def headers(self, path: str = "/live", method: str = "GET", key: str = "user-key") -> list[tuple[str, str]]:
        return [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x"), ("x-api-key", key)]

    def request(self, **fields: str) -> int:
        stream: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, self.headers(**fields), end_stream=True)
        return stream

    def read(self) -> list[Any]:
        data = self.socket.recv(1 << 16)
        return self.h2.receive_data(data) if data else [None]

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Type, stream and payload of each frame until the server closes, whatever this side's state is."""
        data = b""
        while piece := self.socket.recv(1 << 16):
            data += piece
            while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3])):
                yield data[3], int.from_bytes(data[5:9]) & 0x7FFF_FFFF, data[9:end]
                data = data[end:]


def open_upload(client: H2Client) -> int:
    """A stream whose body is still to come."""
    stream: int = client.h2.get_next_available_stream_id()
    headers = [*client.headers("/v1/completions", "POST"), ("content-type", "application/json")]
    client.h2.send_headers(stream, headers, end_stream=False)
    client.flush()
    return stream
