"""What a client can do to the server below the API: slowness, size, nonsense, half a conversation. All is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import httpx
import psutil
import pytest

import app.server
from actors.arguments import Arguments
from app.application import MAX_BODY, Troupe
from app.server import configuration, listen, serve
from tests.app.security.conftest import Target
from tests.waiting import PATIENCE, blocking_until, until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: user-key\r\nContent-Type: application/json\r\n"


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


def send_while_read(connection: socket.socket, pieces: Iterator[bytes], most: int) -> tuple[bytes, int]:
    """Send until the server answers or closes, at most ``most`` bytes; what it said, and how much it took."""
    sent = 0
    connection.settimeout(0.0)
    answer = b""
    deadline = time.monotonic() + PATIENCE
    for piece in pieces:
        while piece and time.monotonic() < deadline:
            try:
                answer += (got := connection.recv(1 << 16))
                if not got:
                    return answer, sent
            except BlockingIOError:
                pass
            except OSError:
                return answer, sent
            try:
                done = connection.send(piece)
            except BlockingIOError:
                time.sleep(0.001)
                continue
            except OSError:
                return answer, sent
            sent, piece = sent + done, piece[done:]
        if answer or sent >= most:
            break
    connection.settimeout(PATIENCE)
    return answer + read_all(connection), sent


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(autouse=True)
def _unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "target" in request.fixturenames:
        target = request.getfixturevalue("target")
        assert target.client.get("/health").status_code == 200
        target.assert_unharmed()


# -- heads


@pytest.mark.parametrize(
    "head",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * 200_000,
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)),
        b"GET /" + b"a" * 200_000,
        b"A" * 200_000,
    ],
    ids=["one long header", "many headers", "a long path", "no request line"],
)
def test_a_head_without_end_is_cut_at_64_kib(target: Target, head: bytes) -> None:
    with connected(target) as connection:
        pieces = (head[i : i + 4096] for i in range(0, len(head), 4096))
        answer, sent = send_while_read(connection, pieces, len(head))
    assert statuses(answer) in ([], [400], [414], [431])
    assert sent < 5 * 1024 * 1024
    assert b"user" not in answer


@pytest.mark.parametrize(
    "request_",
    [
        "GET /version HTTP/1.1\r\n\r\n",  # no Host
        "GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "GET /version HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
        "GET /version HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        "GET /version HTTP/1.1\r\nHost: x\r\nA\r\n\r\n",
        "GET  /version  HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /version HTTP/9.9\r\nHost: x\r\n\r\n",
        "GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
        "G\x7fT / HTTP/1.1\r\nHost: x\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # TLS
        "\x00" * 100 + "\r\n\r\n",
        HEAD
        + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + "Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
        HEAD + "Content-Length: -1\r\n\r\n{}",
        HEAD + "Content-Length: 1e3\r\n\r\n{}",
        HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n",
        HEAD + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        HEAD + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n",
    ],
)
def test_nonsense_is_refused_and_the_connection_closed(target: Target, request_: str) -> None:
    with connected(target) as connection:
        connection.sendall(request_.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert all(400 <= status < 506 and status != 500 for status in statuses(answer)), answer[:300]
    assert len(statuses(answer)) <= 1
    assert b"tiny" not in answer


def test_requests_in_one_piece_are_answered_in_their_order(target: Target) -> None:
    one = "GET /{} HTTP/1.1\r\nHost: x\r\nx-api-key: user-key\r\n"
    text = (
        one.format("live")
        + "\r\n"
        + one.format("nothing")
        + "\r\n"
        + one.format("version")
        + "Connection: close\r\n\r\n"
    )
    with connected(target) as connection:
        connection.sendall(text.encode())
        answer = read_all(connection)
    assert statuses(answer) == [200, 404, 200]


# -- bodies


def test_a_body_that_is_announced_too_large_is_not_read(target: Target) -> None:
    with connected(target) as connection:
        connection.sendall((HEAD + f"Content-Length: {10**12}\r\n\r\n").encode())
        answer = read_all(connection)
    assert statuses(answer) == [413]


def test_a_body_without_end_is_cut_at_its_limit(target: Target) -> None:
    def pieces() -> Iterator[bytes]:
        yield (HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode()
        while True:
            yield b"10000\r\n" + b" " * 65536 + b"\r\n"

    with connected(target) as connection:
        answer, sent = send_while_read(connection, pieces(), 100 * MAX_BODY)
    assert statuses(answer) in ([413], [])
    assert sent < 4 * MAX_BODY


def test_a_body_without_a_key_is_dropped_as_far_as_is_reasonable(target: Target) -> None:
    def pieces() -> Iterator[bytes]:
        yield (HEAD.replace("user-key", "wrong") + "Transfer-Encoding: chunked\r\n\r\n").encode()
        while True:
            yield b"10000\r\n" + b" " * 65536 + b"\r\n"

    with connected(target) as connection:
        answer, sent = send_while_read(connection, pieces(), 100 * MAX_BODY)
    assert statuses(answer) in ([401], [])
    assert sent < 4 * MAX_BODY


@pytest.mark.parametrize(
    ("change", "size", "status"),
    [
        (("user-key", "wrong"), MAX_BODY, 401),
        (("", ""), MAX_BODY + (4 << 20), 413),
        (("application/json", "image/png"), MAX_BODY, 415),
        (("/v1/completions", "/v1/nothing"), MAX_BODY, 404),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_learns_why_it_was_refused(
    target: Target, change: tuple[str, str], size: int, status: int, chunked: bool
) -> None:
    head = HEAD.replace(*change) if change[0] else HEAD
    with connected(target) as connection:
        if chunked:
            connection.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
            for _ in range(size >> 16):
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        else:
            connection.sendall((head + f"Content-Length: {size}\r\n\r\n").encode() + b" " * size)
        # The connection is still good for the next request.
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert statuses(read_all(connection)) == [status, 200]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_no_body_is_unpacked(target: Target, encoding: str) -> None:
    import gzip

    bomb = gzip.compress(b" " * 50_000_000)
    answer = target.post(
        "/v1/completions",
        bomb,
        headers={"Content-Encoding": encoding, "Content-Type": "application/json", "Connection": "close"},
    )
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_a_body_longer_than_announced_is_another_request(target: Target) -> None:
    with connected(target) as connection:
        connection.sendall((HEAD + 'Content-Length: 2\r\n\r\n{}{"prompt": "x"}').encode())
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert set(statuses(answer)) <= {400}


BAD_JSON = [
    b"[" * 1_000_000,
    b'{"a":' * 1_000_000,
    b'{"prompt": "x", "x": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    b'{"prompt": "x", "chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "x", "temperature": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "x", "temperature": 1e999999999}',
    b'{"prompt": "x", "temperature": -1e-999999999}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 0x10}',
    b'{"prompt": "x", "seed": 01}',
    b'{"prompt": "x", "seed": 1.0000000000000000000000000000001}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "x\x00"}',
    b"\xef\xbb\xbf{}",
    b'{"prompt": "x"} {"prompt": "y"}',
    b'{"prompt": "x",}',
    b"{'prompt': 'x'}",
    b'{"prompt": "x" /* */}',
    b"null",
    b"",
    b"{" + b",".join(b'"f%d": 1' % i for i in range(10_000)) + b', "prompt": "x"}',
    b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}",
    b'{"prompt": [' + b'"",' * 2_000_000 + b'""]}',
]


@pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[:40]))
def test_bad_json_is_a_400_in_the_apis_own_form(target: Target, body: bytes) -> None:
    answer = target.post("/v1/completions", body)
    harmless = b"-1e-999999999" in body or b"[" * 500_000 in body or b"chat_template_kwargs" in body
    assert answer.status_code == 400 or (harmless and answer.status_code == 200), answer.text[:200]
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.text) < 2000


def test_of_a_field_given_twice_every_part_sees_the_same(target: Target) -> None:
    """Else a field could be checked in one form and used in another."""
    last = target.post("/v1/completions", b'{"prompt": "x", "max_tokens": 99999, "max_tokens": 1}')
    assert last.status_code == 200
    assert last.json()["usage"]["completion_tokens"] == 1
    first = target.post("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "max_tokens": 99999}')
    assert first.json()["error"]["param"] == "max_tokens"
    refused = target.post("/v1/completions", b'{"prompt": "x", "regex": null, "regex": "a+"}')
    assert refused.json()["error"]["param"] == "regex"


# -- half a conversation


def test_a_client_that_half_closes_is_let_go(target: Target) -> None:
    process = psutil.Process(target.server.process.pid)
    target.client.get("/live")
    before = process.num_fds()
    body = '{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    whole = HEAD + f"Content-Length: {len(body)}\r\n\r\n" + body
    for part in (whole, whole[: len(whole) - 9], HEAD, HEAD[:30], ""):
        with connected(target) as connection:
            connection.sendall(part.encode())
            connection.shutdown(socket.SHUT_WR)
            read_all(connection)
    blocking_until(lambda: process.num_fds() <= before, "a connection is kept")


# -- HTTP/2


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


# -- slowness, in a server of this process with short times


@pytest.fixture
async def hurried(
    make_application: Callable[..., Troupe], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Troupe, int]]:
    monkeypatch.setattr(app.server, "HEADER_TIMEOUT", 1.0)
    monkeypatch.setattr(app.server, "_signals", lambda numbers, handler: contextlib.nullcontext())
    application = make_application()
    application.config["BODY_TIMEOUT"] = 0.3
    config = configuration(Arguments(port=0))
    config.keep_alive_timeout = 0.6
    config.graceful_timeout = 1
    sockets = listen(config)
    port = sockets.insecure_sockets[0].getsockname()[1]
    task = asyncio.create_task(serve(application, application, config, sockets))
    try:
        yield application, port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def dripping(port: int, before: bytes, drip: bytes) -> bytes:
    """Send byte by byte until the server has had enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(before)
        async with asyncio.timeout(PATIENCE):
            while not reader.at_eof():
                writer.write(drip)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        answer += await reader.read(1 << 16)
    writer.close()
    return answer


async def test_a_head_that_comes_drop_by_drop_is_not_waited_for(hurried: tuple[Troupe, int]) -> None:
    assert await dripping(hurried[1], b"GET /version HTTP/1.1\r\nHost: x\r\nX: ", b"a") == b""


async def test_a_connection_that_says_nothing_is_closed(hurried: tuple[Troupe, int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hurried[1])
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b""
    writer.close()


async def test_a_second_head_that_comes_drop_by_drop_is_not_waited_for(hurried: tuple[Troupe, int]) -> None:
    answer = await dripping(hurried[1], b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nX: ", b"a")
    assert statuses(answer) == [200]


async def test_a_body_that_comes_drop_by_drop_is_a_408(hurried: tuple[Troupe, int]) -> None:
    answer = await dripping(hurried[1], (HEAD + "Content-Length: 100000\r\n\r\n").encode(), b" ")
    assert statuses(answer) == [408]


async def test_a_server_keeps_files_for_itself(hurried: tuple[Troupe, int], monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = app.server.Crowd()
    assert crowd.limit >= 64
    monkeypatch.setattr(app.server, "Crowd", lambda: crowd)
    monkeypatch.setattr(crowd, "limit", 2)
    application, config = hurried[0], configuration(Arguments(port=0))
    sockets = listen(config)
    port = sockets.insecure_sockets[0].getsockname()[1]
    task = asyncio.create_task(serve(application, application, config, sockets))
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            assert await held[2][0].read() == b""
        assert crowd.open == 2
        for _, writer in held:
            writer.close()
        await until(lambda: not crowd.open)
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/live")).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
