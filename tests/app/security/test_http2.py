"""HTTP/2 below the API: the same door, and a client that floods it or speaks out of turn."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import pytest

from tests.app.security.conftest import Target
from tests.app.security.wire import connected, unharmed

__all__ = ["unharmed"]


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


def test_http2_works_and_has_the_same_door(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        asked = {
            client.request(path="/v1/models"): b"200",
            client.request(path="/v1/models", key="x"): b"401",
            client.request(path="//v1/models", key="x"): b"401",
        }
        client.flush()
        got: dict[int, bytes] = {}
        while len(got) < len(asked):
            for event in client.read():
                if isinstance(event, h2.events.ResponseReceived):
                    told = dict(event.headers)
                    got[event.stream_id] = told.get(b":status") or told[":status"].encode()  # type: ignore[call-overload]
        assert got == asked


@pytest.mark.parametrize("path", ["/live", "/v1/models", "/v1/completions"])
def test_streams_opened_and_reset_at_once(target: Target, path: str) -> None:
    """CVE-2023-44487: the cost of a stream must end with the stream."""
    with connected(target) as connection:
        client = H2Client(connection)
        with contextlib.suppress(OSError):
            for _ in range(3000):
                stream = client.request(path=path)
                client.h2.reset_stream(stream)
                client.flush()


def test_more_streams_than_agreed_close_the_connection(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        client.h2.remote_settings.max_concurrent_streams = 1 << 20
        ended = False
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            for _ in range(3000):
                stream = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream, client.headers("/v1/completions", "POST"), end_stream=False)
                client.flush()
            connection.settimeout(5)
            while not ended:
                ended = any(
                    event is None or isinstance(event, h2.events.ConnectionTerminated) for event in client.read()
                )


EMPTY_DATA = bytes([0, 0, 0, 0, 0, 0, 0, 0, 1])
FLOODS = {
    "ping": bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"12345678",
    "settings": bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    "priority": bytes([0, 0, 5, 2, 0, 0, 0, 0, 7, 0, 0, 0, 0, 16]),
    "unknown": bytes([0, 0, 0, 0xBB, 0, 0, 0, 0, 0]),
    "empty data": EMPTY_DATA,
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_that_ask_for_nothing_ends_its_connection(target: Target, name: str) -> None:
    """CVE-2019-9512, -9515 and -9518: each frame costs the server more than its sender."""
    with connected(target) as connection:
        client = H2Client(connection)
        if FLOODS[name] is EMPTY_DATA:
            stream = client.h2.get_next_available_stream_id()
            headers = [*client.headers("/v1/completions", "POST"), ("content-type", "application/json")]
            client.h2.send_headers(stream, headers, end_stream=False)
            client.flush()
        with contextlib.suppress(ConnectionError):  # what was sent and is not read resets the connection
            connection.sendall(FLOODS[name] * 1500)
            told: list[Any] = []
            while not any(isinstance(event, h2.events.ConnectionTerminated) for event in told):
                told = client.read()
                assert None not in told
            [ended] = [event for event in told if isinstance(event, h2.events.ConnectionTerminated)]
            assert ended.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM


def test_a_body_that_comes_after_its_answer_ends_no_other_stream(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        refused = client.h2.get_next_available_stream_id()
        client.h2.send_headers(refused, client.headers("/v1/completions", "POST", "wrong"), end_stream=False)
        client.flush()
        told: list[Any] = []
        while not any(isinstance(event, h2.events.StreamEnded) for event in told):
            told += client.read()
        for _ in range(3):
            client.h2.send_data(refused, b"x" * 1000)
            client.flush()
        stream = client.request()
        client.flush()
        while not any(isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream for event in told):
            told += client.read()
            assert None not in told


def test_a_client_that_pings_now_and_then_is_served(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        for _ in range(20):
            client.h2.ping(b"12345678")
            client.flush()
        stream = client.request()
        client.flush()
        answered = False
        while not answered:
            answered = any(
                isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream for event in client.read()
            )


@pytest.mark.parametrize("frames", ["data after the answer", "continuation", "ping", "settings", "window", "garbage"])
def test_frames_out_of_turn(target: Target, frames: str) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        with contextlib.suppress(OSError):
            if frames == "data after the answer":
                stream = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream, client.headers("/v1/completions", "POST", "wrong"), end_stream=False)
                client.flush()
                time.sleep(0.1)
                for _ in range(3):
                    client.h2.send_data(stream, b"x" * 1000)
                    client.flush()
            elif frames == "continuation":
                connection.sendall(
                    bytes([0, 0, 1, 1, 0, 0, 0, 0, 1, 0]) + bytes([0, 0, 1, 9, 0, 0, 0, 0, 1, 0]) * 10_000
                )
            elif frames == "ping":
                for _ in range(2000):
                    client.h2.ping(b"12345678")
                client.flush()
            elif frames == "settings":
                connection.sendall(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + b"\x00\x03\x00\x00\x00\x01" * 1)
                connection.sendall((bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) * 5000)
            elif frames == "window":
                connection.sendall(bytes([0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7F, 0xFF, 0xFF, 0xFF]) * 100)
            else:
                connection.sendall(b"\xff" * 100_000)
