"""What the terminal shows of a server's address."""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Iterator

import httpx
import pytest

from actors.options import Arguments
from app.server.startup_lines import exposure, first_steps, url_of
from tests.kits.waiting import PATIENCE


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::1", "::"])
def bound(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.create_server((request.param, 0), family=family) as made:
            yield made
    except OSError:
        pytest.skip("this machine has no IPv6")


def test_the_url_is_one_that_this_machine_can_open(bound: socket.socket) -> None:
    host = "[::1]" if bound.family == socket.AF_INET6 else "127.0.0.1"
    assert url_of(bound) == f"http://{host}:{bound.getsockname()[1]}"


def test_only_an_open_server_without_a_key_warns(bound: socket.socket) -> None:
    is_open = bound.getsockname()[0] in ("0.0.0.0", "::")
    warning = exposure(Arguments(), bound)
    assert (warning is not None) == is_open
    assert warning is None or "--api-key" in warning
    assert exposure(Arguments(api_key="key"), bound) is None
    assert (exposure(Arguments(admin_api_key="key"), bound) is not None) == is_open


async def test_the_page_and_a_first_request_are_reported_when_ready(application, serve, until, caplog) -> None:
    caplog.set_level(logging.INFO, logger="troupe.http")
    application.url = await serve(application)
    reported = lambda: [record.getMessage() for record in caplog.records]  # noqa: E731
    await until(lambda: any("first request" in line for line in reported()))
    assert f"The live page: {application.url}/" in reported()
    words = shlex.split(next(line for line in reported() if "first request" in line).partition("curl ")[2])
    assert words[1] == "-H"
    assert words[3] == "-d"
    name, _, value = words[2].partition(": ")
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(words[0], headers={name: value}, content=words[4])
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("options", "chats", "expected", "absent"),
    [
        ({"api_key": "secret-key"}, True, "Bearer KEY", "secret-key"),
        ({"disable_page": True}, True, "/v1/chat/completions", "live page"),
        ({}, False, "/v1/completions", "chat"),
        ({"skip_tokenizer_init": True}, False, '{"prompt":[1,2,3]}', "Once"),
    ],
)
def test_the_first_request_suits_the_server(options, chats, expected, absent) -> None:
    lines = "\n".join(first_steps(Arguments(**options), "http://127.0.0.1:8000", chats=chats))
    assert expected in lines
    assert absent not in lines
