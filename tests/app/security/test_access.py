"""Every route declares who may use it, and no spelling of a request gets around that."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from quart import Quart

from app.application import Troupe
from app.server.auth import AccessLevel, Keyring
from app.server.errors import ApiError
from app.server.routes import Route, RouteTable
from tests.kits.target import Target
from tests.kits.waiting import PATIENCE

CLOSED = (401, 404)
SERVER = ("127.0.0.1", 8000)


def test_stored_things_belong_to_their_owner() -> None:
    ring = Keyring(user=("a", "b"), admin=("a-dmin",))
    owners = {ring.owner(tenant) for tenant in ("key-1", "key-2", "admin")}
    assert len(owners | {""}) == 4
    assert {ring.tenant_of(owner) for owner in owners} == {"key-1", "key-2", "admin"}
    assert ring.tenant_of(Keyring(user=("c",)).owner("")) is None
    assert ring.tenant_of("") is None
    for alone in (Keyring(), Keyring(admin=("a",)), Keyring(user=("a",))):
        assert alone.tenant_of(alone.owner("")) == ""


def test_an_admin_route_names_the_key_that_it_requires() -> None:
    ring = Keyring(user=("a",), admin=("root",))
    for headers, begin in (((), "An admin key is required"), (((b"x-api-key", b"a"),), "Incorrect admin key")):
        with pytest.raises(ApiError) as refused:
            ring.check(AccessLevel.ADMIN, headers, SERVER)
        assert refused.value.status == 401
        assert refused.value.message.startswith(f"{begin} (of --admin-api-key);")
        with pytest.raises(ApiError, match="API key"):
            ring.check(AccessLevel.USER, (), SERVER)


def undeclared(application: Quart, table: RouteTable) -> list[str]:
    """Every rule of the application, over HTTP or a websocket, that the route table does not know."""
    found = []
    for rule in application.url_map.iter_rules():
        path = re.sub(r"<[^>]*>", "x", rule.rule)
        methods = {"websocket"} if rule.websocket else set(rule.methods or ()) - {"HEAD", "OPTIONS"}
        for method in methods:
            route = table.find(method, path)
            if route is None or not isinstance(route.level, AccessLevel):
                found.append(f"{method} {rule.rule}")
    return found


async def call(
    application: Any, path: str, method: str = "GET", *, headers: dict[str, str] | None = None, **scope: Any
) -> int:
    """The status of a request whose path is exactly this, as an ASGI server would hand it over; 0 for none."""
    statuses = [0]
    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 5),
        "server": SERVER,
        "extensions": {},
        **scope,
    }
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await application(scope, receive, send)
    return statuses[-1]


@pytest.fixture
def locked(make_application: Any) -> Troupe:
    return make_application(api_key="user-key", admin_api_key="admin-key")


def protected(application: Troupe) -> list[Route]:
    return [route for route in application.service.table.routes if route.level is not AccessLevel.PUBLIC]


def concrete(route: Route) -> str:
    return route.filled("fake")


def test_every_rule_of_the_application_is_declared(locked: Troupe) -> None:
    assert undeclared(locked, locked.service.table) == []


def test_a_rule_that_is_not_declared_is_found(locked: Troupe) -> None:
    async def view() -> str:
        return "open"

    locked.add_url_rule("/secret", endpoint="secret", view_func=view)
    locked.add_websocket("/socket", endpoint="socket", view_func=view)
    assert undeclared(locked, locked.service.table) == ["GET /secret", "websocket /socket"]


async def test_a_rule_that_is_not_declared_is_never_reached(locked: Troupe) -> None:
    async def view() -> str:
        raise AssertionError("reached")

    locked.add_url_rule("/secret", endpoint="secret", view_func=view)
    assert await call(locked, "/secret") == 401
    assert await call(locked, "/secret", headers={"x-api-key": "admin-key"}) == 404


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/chat/completions", "/flush_cache", "/live", "/"])
@pytest.mark.parametrize("headers", [[], [(b"x-api-key", b"admin-key")]])
async def test_no_websocket_opens(locked: Troupe, path: str, headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    await locked({"type": "websocket", "path": path, "headers": headers, "server": SERVER}, receive, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer user-ke"},
        {"authorization": "Bearer user-keyy"},
        {"authorization": "Bearer USER-KEY"},
        {"authorization": "Bearer user-key,admin-key"},
        {"authorization": "Basic " + base64.b64encode(b"user-key:admin-key").decode()},
        {"authorization": "user-key"},
        {"cookie": "api_key=user-key; x-api-key=user-key"},
        {"x-api-key": "\xff"},
        {"x_api_key": "user-key"},
        {"api-key": "user-key"},
        {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1"},
        {"x-original-url": "/health", "x-rewrite-url": "/health"},
        {"x-http-method-override": "OPTIONS"},
        {"host": "localhost/health"},
        {"host": "/health?"},
        {"host": "health#"},
        {"referer": "http://localhost/", "origin": "http://localhost"},
    ],
)
async def test_without_a_key_no_header_opens_a_route(locked: Troupe, headers: dict[str, str]) -> None:
    for route in protected(locked):
        for method in (*route.methods, "HEAD", "OPTIONS", "get", "TRACE"):
            status = await call(locked, concrete(route), method, headers=headers)
            assert status == 401, (route.path, method, headers)


def spellings(path: str) -> Iterator[str]:
    yield from (path + "/", "/" + path, path.replace("/", "//"), path.upper(), path + "//", path + "/.", path + "/..")
    yield from (
        f"/health/..{path}",
        f"/.{path}",
        f"/health{path}",
        f"/live/../..{path}",
        path + ";x=/health",
        path + "#",
    )
    yield from (
        quote(path, safe=""),
        path.replace("/", "%2f"),
        path.replace("/", "\\"),
        path + "%00",
        path + "\0/health",
    )
    yield from (path + "?/health", path[1:], f"http://localhost{path}", f"{path}/../health", " " + path, path + " ")


async def test_no_spelling_of_a_path_opens_a_route(locked: Troupe) -> None:
    for route in protected(locked):
        for path in spellings(concrete(route)):
            for method in (*route.methods, "HEAD"):
                status = await call(locked, path, method)
                assert status == 401, (path, method)


async def test_no_key_in_a_query_opens_a_route(locked: Troupe) -> None:
    for route in protected(locked):
        for query in (b"api_key=user-key", b"key=user-key", b"token=user-key", b"authorization=Bearer%20user-key"):
            assert await call(locked, concrete(route), route.methods[0], query_string=query) == 401


async def test_a_servers_own_prefix_opens_no_route(make_application: Any) -> None:
    application = make_application(api_key="user-key", admin_api_key="admin-key", fastapi_root_path="/health")
    for route in protected(application):
        for path in (f"/health{concrete(route)}", f"/health/health{concrete(route)}", concrete(route)):
            for root in ("", "/health", "/health/health"):
                assert await call(application, path, route.methods[0], root_path=root) == 401


async def test_users_cannot_administer(locked: Troupe) -> None:
    admin = [route for route in locked.service.table.routes if route.level is AccessLevel.ADMIN]
    assert admin
    for route in admin:
        for path in (concrete(route), *spellings(concrete(route))):
            status = await call(locked, path, route.methods[0], headers={"x-api-key": "user-key"})
            assert status in CLOSED, path
        assert await call(locked, concrete(route), route.methods[0], headers={"x-api-key": "user-key"}) == 401


REQUEST_LINES = [
    "GET /v1/models HTTP/1.1",
    "GET //v1/models HTTP/1.1",
    "GET /%76%31/models HTTP/1.1",
    "GET /v1%2Fmodels HTTP/1.1",
    "GET /health/../v1/models HTTP/1.1",
    "GET /health/%2e%2e/v1/models HTTP/1.1",
    "GET http://localhost/v1/models HTTP/1.1",
    "GET http://localhost/health@/v1/models HTTP/1.1",
    "GET /v1/models?x=/health HTTP/1.1",
    "GET /v1/models#/health HTTP/1.1",
    "GET /v1/models;/health HTTP/1.1",
    "GET /health\\..\\v1\\models HTTP/1.1",
    "GET *  HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "CONNECT /v1/models HTTP/1.1",
    "GET /v1/models HTTP/1.0",
    "HEAD /v1/models HTTP/1.1",
]


@pytest.mark.parametrize("line", REQUEST_LINES)
@pytest.mark.parametrize("host", ["localhost", "localhost/health", "health"])
def test_on_the_wire_no_request_line_opens_a_route(target: Target, line: str, host: str) -> None:
    port = int(target.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(f"{line}\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    if answer:
        assert int(answer.split()[1]) in (400, 401, 404, 405), answer[:200]
    assert b"tiny" not in answer


def test_the_same_answer_whatever_is_hidden(target: Target) -> None:
    """A key is asked for before a path is known not to be there."""
    import httpx

    with httpx.Client(base_url=target.url, timeout=PATIENCE) as nobody:
        there, not_there = nobody.get("/v1/models"), nobody.get("/v1/nothing")
    assert there.status_code == not_there.status_code == 401
    assert there.json() == not_there.json()
