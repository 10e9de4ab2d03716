"""HTTP/2 below the API: the same checks, and clients that flood it or break its order."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.server.http2 import BURST
from tests.kits.http2_client import H2Client, open_upload
from tests.kits.raw_http import connected, unharmed
from tests.kits.target import USER, Target
from tests.kits.waiting import PATIENCE, blocking_until

__all__ = ["unharmed"]


def test_http2_works_and_has_the_same_checks(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        streams = {
            client.request(path="/v1/models"): b"200",
            client.request(path="/v1/models", key="x"): b"401",
            client.request(path="//v1/models", key="x"): b"401",
        }
        client.flush()
        got: dict[int, bytes] = {}
        while len(got) < len(streams):
            for event in client.read():
                if isinstance(event, h2.events.ResponseReceived):
                    reported = dict(event.headers)
                    got[event.stream_id] = reported.get(b":status") or reported[":status"].encode()  # type: ignore[call-overload]
        assert got == streams


@pytest.mark.parametrize("path", ["/live", "/v1/models", "/v1/completions"])
def test_streams_opened_and_reset_at_once(target: Target, path: str) -> None:
    """CVE-2023-44487: the cost of a stream must end with the stream. Hypercorn closes a connection with 1,000 streams
    that it has not cleaned up, so the client waits for an answer now and then."""
    with connected(target) as connection:
        client = H2Client(connection)
        for _ in range(10):
            for _ in range(300):
                stream = client.request(path=path)
                client.h2.reset_stream(stream)
                client.flush()
            last, answered = client.request(), False
            client.flush()
            while not answered:
                events = client.read()
                assert events != [None], "it is served no more"
                answers = [each for each in events if isinstance(each, h2.events.ResponseReceived)]
                answered = last in {each.stream_id for each in answers}


def aborted(target: Target) -> float:
    families = text_string_to_metric_families(target.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "troupe_requests_total"]
    return sum(sample.value for sample in samples if sample.labels["finish_reason"] == "abort")


def test_the_reset_of_a_stream_ends_its_request(target: Target) -> None:
    before = aborted(target)
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with connected(target) as connection:
        client = H2Client(connection)
        stream = open_upload(client)
        client.h2.send_data(stream, json.dumps(body).encode(), end_stream=True)
        client.flush()
        while not any(isinstance(event, h2.events.DataReceived) for event in client.read()):
            pass
        client.h2.reset_stream(stream)
        client.flush()
        blocking_until(lambda: aborted(target) > before, "its request goes on")


def test_more_streams_than_agreed_close_the_connection(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        client.h2.remote_settings.max_concurrent_streams = 1 << 20
        for _ in range(3000):
            stream = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream, client.headers("/v1/completions", "POST"), end_stream=False)
        ended_with(client, client.h2.data_to_send())


def ended_with(client: H2Client, sent: bytes) -> int | None:
    """The code with which the server ends the connection after it was ``sent`` this; None if it resets it. What is
    asked for behind that is not served."""
    with contextlib.suppress(ConnectionError):  # what was sent and is not read resets the connection
        streams = client.request()
        client.socket.sendall(sent + client.h2.data_to_send())
        for kind, stream, payload in client.frames():
            assert (kind, stream) != (HEADERS, streams), "the connection is served"
            if kind == GOAWAY:
                return int.from_bytes(payload[4:8])
        raise AssertionError("the connection ended without a reason")
    return None


HEADERS, GOAWAY = 1, 7
EMPTY_DATA = bytes([0, 0, 0, 0, 0, 0, 0, 0, 1])
FLOODS = {
    "ping": bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"12345678",
    "settings": bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    "priority": bytes([0, 0, 5, 2, 0, 0, 0, 0, 7, 0, 0, 0, 0, 16]),
    "unknown": bytes([0, 0, 0, 0xBB, 0, 0, 0, 0, 0]),
    "empty data": EMPTY_DATA,
    "window": bytes([0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
    "window of a stream": bytes([0, 0, 4, 8, 0, 0, 0, 0, 1, 0, 0, 0, 1]),
    "pong": bytes([0, 0, 8, 6, 1, 0, 0, 0, 0]) + b"12345678",
    "settings received": bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]),
    "alternative service": bytes([0, 0, 4, 10, 0, 0, 0, 0, 0, 0, 1]) + b"xa",
}
TO_A_CLOSED_STREAM = {
    "data": bytes([0, 0, 1, 0, 0, 0, 0, 0, 1]) + b"x",
    "window": FLOODS["window of a stream"],
    "reset": bytes([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_that_ask_for_nothing_ends_its_connection(target: Target, name: str) -> None:
    """CVE-2019-9512, -9515 and -9518: each frame costs the server more than its sender."""
    with connected(target) as connection:
        client = H2Client(connection)
        if "data" in name or "stream" in name:
            open_upload(client)
        assert_calmed(client, FLOODS[name] * 1500)


@pytest.mark.parametrize("name", TO_A_CLOSED_STREAM)
def test_a_flood_of_frames_to_a_closed_stream_ends_its_connection(target: Target, name: str) -> None:
    """The h2 library reports nothing of such frames, though it reads each and answers some."""
    with connected(target) as connection:
        client = H2Client(connection)
        client.h2.reset_stream(open_upload(client))
        assert_calmed(client, client.h2.data_to_send() + TO_A_CLOSED_STREAM[name] * 1500)


def assert_calmed(client: H2Client, flood: bytes) -> None:
    assert ended_with(client, flood) in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, None)


def test_a_client_that_answers_each_frame_with_two_updates_is_served(target: Target) -> None:
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with connected(target) as connection:
        client = H2Client(connection)
        frames = 0
        client.h2.increment_flow_control_window(1 << 24)
        for _ in range(6):
            stream = open_upload(client)
            client.h2.increment_flow_control_window(1 << 24, stream)
            client.h2.send_data(stream, json.dumps(body).encode(), end_stream=True)
            client.flush()
            ended = False
            while not ended:
                for event in client.read():
                    assert event is not None
                    assert not isinstance(event, h2.events.ConnectionTerminated)
                    if isinstance(event, h2.events.DataReceived) and event.data:
                        frames += 1
                        connection.sendall(FLOODS["window"] + window_update(stream))
                    ended = ended or isinstance(event, h2.events.StreamEnded)
        assert 2 * frames > BURST + 1000  # many more than are allowed without data


def window_update(stream: int) -> bytes:
    return bytes([0, 0, 4, 8, 0]) + stream.to_bytes(4) + (1).to_bytes(4)


def test_many_downloads_of_an_ordinary_client_are_served(target: Target) -> None:
    """httpx opens the window of each stream, and more of it as it reads."""
    with httpx.Client(http1=False, http2=True, trust_env=False, timeout=PATIENCE) as client:
        for _ in range(300):
            answer = client.get(f"{target.url}/openapi.json", headers=USER)
            assert answer.http_version == "HTTP/2"
            assert answer.status_code == 200


def test_a_body_that_comes_after_its_answer_ends_no_other_stream(target: Target) -> None:
    with connected(target) as connection:
        client = H2Client(connection)
        refused = client.h2.get_next_available_stream_id()
        client.h2.send_headers(refused, client.headers("/v1/completions", "POST", "wrong"), end_stream=False)
        client.flush()
        reported: list[Any] = []
        while not any(isinstance(event, h2.events.StreamEnded) for event in reported):
            reported += client.read()
        for _ in range(3):
            client.h2.send_data(refused, b"x" * 1000)
            client.flush()
        stream = client.request()
        client.flush()
        while not any(
            isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream for event in reported
        ):
            reported += client.read()
            assert None not in reported


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
            reported = client.read()
            assert None not in reported, "the connection is closed"
            answered = any(
                isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream for event in reported
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
