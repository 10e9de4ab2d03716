"""What a client can do to the server below the API: size, nonsense, half a conversation. All is bounded."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from app.server.request_body import MAX_BODY
from tests.kits.addresses import port_of
from tests.kits.raw_http import HEAD, connected, connections, read_all, statuses, unharmed
from tests.kits.target import Target
from tests.kits.waiting import PATIENCE, blocking_until

__all__ = ["unharmed"]


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
        *(
            HEAD + ambiguous + "GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: user-key\r\n\r\n"
            for ambiguous in (
                "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\nG",
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
                "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
                "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
                "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
                "Content-Length: 2, 3\r\n\r\n{}",
                "Content-Length: +2\r\n\r\n{}",
                "Content-Length: \xb2\r\n\r\n{}",
                "Content-Length: 0x2\r\n\r\n{}",
                "X: a\rTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
                "X: a\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
                "Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
                "Transfer-Encoding: chunked\r\n\r\n2;a\nx\r\n{}\r\n0\r\n\r\n",
                "Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
                "Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
            )
        ),
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
    b'{"prompt": "x", "seed": 1.0000000000000002}',
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


def test_every_part_reads_the_same_value_of_a_duplicate_field(target: Target) -> None:
    """Else a field could be checked in one form and used in another."""
    last = target.post("/v1/completions", b'{"prompt": "x", "max_tokens": 99999, "max_tokens": 1}')
    assert last.status_code == 200
    assert last.json()["usage"]["completion_tokens"] == 1
    first = target.post("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "max_tokens": 99999}')
    assert first.json()["error"]["param"] == "max_tokens"
    refused = target.post("/v1/completions", b'{"prompt": "x", "regex": null, "regex": "(a"}')
    assert refused.json()["error"]["param"] == "regex"


# -- half a conversation


def test_a_client_that_half_closes_is_let_go(target: Target) -> None:
    ports = set[int]()
    body = '{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    whole = HEAD + f"Content-Length: {len(body)}\r\n\r\n" + body
    for part in (whole, whole[: len(whole) - 9], HEAD, HEAD[:30], ""):
        with connected(target) as connection:
            ports.add(port_of(connection))
            connection.sendall(part.encode())
            connection.shutdown(socket.SHUT_WR)
            read_all(connection)
    blocking_until(lambda: not connections(target, ports), "a connection is kept")
