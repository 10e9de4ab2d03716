"""Keys, paths, methods and bodies in the middleware; the access log."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from app.route_table import ROUTES
from app.server.auth import AccessLevel
from app.server.request_body import MAX_BODY
from app.server.routes import RouteTable

PUBLIC = {"/live", "/ready", "/health", "/ping", "/", "/page/{file}"}


def concrete(route):
    path = "/stage?frames=1" if route.path == "/stage" else route.path  # which would go on for ever
    return path.replace("{model}", "fake").replace("{file}", "main.js").replace("{id}", "unknown")


async def call(application, path, method="GET", **keywords):
    keywords.setdefault("scope_base", {"server": ("127.0.0.1", 8000)})
    response = await application.test_client().open(path, method=method, **keywords)
    return response, await response.get_data()


def test_only_probes_and_the_page_itself_are_public():
    assert {route.path for route in ROUTES if route.level is AccessLevel.PUBLIC} == PUBLIC


def test_no_two_routes_share_a_path_and_a_method():
    seen = [(method, route.path) for route in ROUTES for method in route.methods]
    assert len(seen) == len(set(seen))


def test_quart_serves_exactly_the_table(make_application):
    application = make_application()
    rules = {rule.endpoint for rule in application.url_map.iter_rules()}
    assert rules == {f"{' '.join(route.methods)} {route.path}" for route in ROUTES}


async def test_every_route_requires_the_key_of_its_level(make_application):
    application = make_application(api_key="user-key", admin_api_key="admin-key")
    for route in ROUTES:
        for method in route.methods:
            for key, allowed in (
                (None, route.level is AccessLevel.PUBLIC),
                ("wrong", route.level is AccessLevel.PUBLIC),
                ("user-key", route.level is not AccessLevel.ADMIN),
                ("admin-key", True),
            ):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                response, data = await call(application, concrete(route), method, headers=headers)
                assert (response.status_code != 401) == allowed, (route.path, method, key)
                if not allowed:
                    body = msgspec.json.decode(data)
                    error = body["error"] if "error" in body else body["message"]  # Cohere's field
                    if isinstance(error, str):  # Ollama's and Cohere's
                        assert "API key" in error
                    else:
                        assert error["type"] == "authentication_error"
                    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "user-key"}, 200),
        ({"Authorization": "bearer user-key"}, 200),
        ({"Authorization": "user-key"}, 401),
        ({"Authorization": "Bearer user-ke"}, 401),
        ({"Authorization": "Bearer user-key2"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({}, 401),
    ],
)
async def test_how_a_key_is_sent(make_application, headers, status):
    response, _ = await call(make_application(api_key="user-key"), "/v1/models", headers=headers)
    assert response.status_code == status


async def test_unknown_paths_require_a_key_too(make_application):
    application = make_application(api_key="user-key")
    assert (await call(application, "/nothing"))[0].status_code == 401
    response, data = await call(application, "/nothing", headers={"x-api-key": "user-key"})
    assert response.status_code == 404
    assert msgspec.json.decode(data)["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/health/../v1/models", "//v1/models", "/v1/models/", "/v1//models", "/live/x"])
async def test_odd_paths_never_reach_a_handler(make_application, path):
    application = make_application(api_key="user-key")
    assert (await call(application, path))[0].status_code == 401
    assert (await call(application, path, headers={"x-api-key": "user-key"}))[0].status_code == 404


async def test_admin_routes_do_not_exist_beside_an_api_key_alone(make_application):
    application = make_application(api_key="user-key")
    response, _ = await call(application, "/flush_cache", "POST", headers={"x-api-key": "user-key"})
    assert response.status_code == 404
    assert application.engine.flushed == 0


@pytest.mark.parametrize(
    ("server", "status"),
    [(("127.0.0.1", 8000), 200), (("::1", 8000), 200), (("10.0.0.5", 8000), 404), (("/run/troupe.sock", None), 200)],
)
async def test_without_keys_admin_routes_answer_on_loopback_only(application, server, status):
    response, _ = await call(application, "/flush_cache", "POST", scope_base={"server": server})
    assert response.status_code == status


async def test_admin_routes_do_not_answer_pages_of_other_sites(application, engine):
    response, _ = await call(application, "/flush_cache", "POST", headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403
    assert engine.flushed == 0


async def test_aborting_all_needs_the_admin_key(make_application):
    application = make_application(api_key="user-key", admin_api_key="admin-key")
    body = {"abort_all": True}
    user, _ = await call(application, "/abort_request", "POST", json=body, headers={"x-api-key": "user-key"})
    admin, _ = await call(application, "/abort_request", "POST", json=body, headers={"x-api-key": "admin-key"})
    assert (user.status_code, admin.status_code) == (401, 200)


@pytest.mark.parametrize("keys", ["first,second", "first"])
@pytest.mark.parametrize("batch", [False, True])
async def test_a_key_aborts_its_own_requests_only(make_application, until, keys, batch):
    application = make_application(api_key=keys, admin_api_key="admin-key")
    engine = application.engine
    engine.gate = asyncio.Event()
    body = {"text": ["Hi", "Ho"] if batch else "Hi", "rid": "job"}
    owner, stranger = ("admin-key", "first") if keys == "first" else ("first", "second")

    async def post(path, key, body):
        return await call(application, path, "POST", json=body, headers={"x-api-key": key})

    async def abort(name, key):
        _, data = await post("/abort_request", key, {"rid": name})
        return msgspec.json.decode(data)["aborted"]

    running = asyncio.create_task(post("/generate", owner, body))
    await until(lambda: len(engine.streams) == 1 + batch)
    names = ["job_1", engine.streams[0].request_id] if batch else ["job", engine.streams[0].request_id]
    assert [await abort(name, stranger) for name in names] == [0, 0]
    assert [await abort(names[0], owner)] == [1]
    assert await abort(names[1], "admin-key") <= 1
    assert (await running)[0].status_code == 200


async def test_websockets_are_closed_before_they_open(make_application):
    application = make_application(api_key="user-key")
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "server": ("127.0.0.1", 1)}
    await application(scope, receive, send)
    assert sent == ["websocket.close"]
    await application({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)
    assert sent[1:] == ["websocket.http.response.start", "websocket.http.response.body"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
async def test_wrong_methods(application, method):
    response, data = await call(application, "/v1/chat/completions", method)
    assert response.status_code == 405
    assert response.headers["Allow"] == "OPTIONS, POST"
    assert msgspec.json.decode(data)["error"]["code"] == "method_not_allowed"


async def test_options_and_head(application):
    response, data = await call(application, "/v1/models", "OPTIONS")
    assert (response.status_code, data) == (204, b"")
    assert response.headers["Allow"] == "GET, HEAD, OPTIONS"
    response, _ = await call(application, "/live", "HEAD")
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        (b"{", {"Content-Type": "application/json"}, 400, "invalid_json"),
        (b"", {"Content-Type": "application/json"}, 400, "invalid_json"),
        (b"[]", {"Content-Type": "application/json"}, 400, "invalid_type"),
        (b'{"prompt": "\xff"}', {"Content-Type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt": ' + b"[" * 100_000, {"Content-Type": "application/json"}, 400, None),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b"{}", {"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
        (b" " * (8 * 1024 * 1024 + 1), {"Content-Type": "application/json"}, 413, "request_entity_too_large"),
    ],
)
async def test_bodies_that_cannot_be_read(application, data, headers, status, code):
    response, answer = await call(application, "/v1/completions", "POST", data=data, headers=headers)
    error = msgspec.json.decode(answer)["error"]
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/json"
    assert code is None or error["code"] == code


async def test_a_body_that_is_too_large_is_answered_with_the_limit(application):
    headers = {"Content-Type": "application/json"}
    _, answer = await call(application, "/v1/completions", "POST", data=b" " * (MAX_BODY + 1), headers=headers)
    assert f"more than {MAX_BODY} bytes" in msgspec.json.decode(answer)["error"]["message"]


async def test_deep_json_is_refused_where_it_is_free_form(application):
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": deep}}
    response, answer = await call(application, "/v1/chat/completions", "POST", json=body)
    assert response.status_code == 400
    assert msgspec.json.decode(answer)["error"]["param"] == "chat_template_kwargs.x"


async def test_a_root_path_is_stripped_and_reported(make_application):
    application = make_application(fastapi_root_path="/llm")
    assert (await call(application, "/llm/v1/models"))[0].status_code == 200
    assert (await call(application, "/v1/models"))[0].status_code == 200
    _, data = await call(application, "/llm/openapi.json")
    assert msgspec.json.decode(data)["servers"] == [{"url": "/llm"}]


async def test_a_root_path_skips_no_check(make_application):
    application = make_application(fastapi_root_path="/llm", api_key="user-key")
    assert (await call(application, "/llm/llm/v1/models"))[0].status_code == 401
    assert (await call(application, "/llm/flush_cache", "POST"))[0].status_code == 404


async def test_the_clients_request_id_comes_back_beside_the_servers(application):
    response, _ = await call(application, "/v1/models", headers={"x-request-id": "client-1"})
    assert response.headers["x-request-id"] == "client-1"
    assert response.headers["x-troupe-request-id"].startswith("req-")
    for odd in ("a b\x01", "x" * 257, ""):
        response, _ = await call(application, "/v1/models", headers={"x-request-id": odd})
        assert response.headers["x-request-id"].startswith("req-")
        assert "x-troupe-request-id" not in response.headers


async def test_one_log_line_a_request_and_none_for_probes(application, caplog):
    with caplog.at_level(logging.INFO, logger="troupe.http"):
        for path in ("/health", "/ready", "/live", "/ping", "/metrics"):
            await call(application, path)
        assert not caplog.records
        await call(application, "/v1/completions", "POST", json={"prompt": "a secret"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("POST /v1/completions 200 done")
    assert "tokens=8+6" in lines[0]
    assert "secret" not in lines[0]


async def test_requests_are_counted_by_route(application, engine):
    await call(application, "/v1/models/none")
    await call(application, "/wild/path")
    value = engine.registry.get_sample_value
    assert value("troupe_http_requests_total", {"endpoint": "/v1/models/{model}", "status": "404"}) == 1
    assert value("troupe_http_requests_total", {"endpoint": "other", "status": "404"}) == 1


def test_a_model_name_may_hold_slashes():
    table = RouteTable(ROUTES)
    assert table.find("GET", "/v1/models/org/name").path == "/v1/models/{model}"
    assert table.find("GET", "/v1/models/") is None


async def test_several_keys_are_distinguished_inside_and_one_key_is_not(make_application):
    application = make_application(api_key="first, second,third", admin_api_key="admin-key")
    body = {"prompt": "Hi", "max_tokens": 1}
    for key in ("second", "first", "third", "admin-key", "second"):
        headers = {"Authorization": f"Bearer {key}"}
        assert (await call(application, "/v1/completions", "POST", json=body, headers=headers))[0].status_code == 200
    tenants = [request["tenant"] for request in application.engine.requests]
    assert tenants == ["key-2", "key-1", "key-3", "admin", "key-2"]
    assert not any(word in tenant for tenant in tenants for word in ("first", "second", "third"))
    for wrong in ("first, second,third", "first,", ","):
        headers = {"Authorization": f"Bearer {wrong}"}
        assert (await call(application, "/v1/models", headers=headers))[0].status_code == 401

    alone = make_application(api_key="first")
    headers = {"Authorization": "Bearer first"}
    assert (await call(alone, "/v1/completions", "POST", json=body, headers=headers))[0].status_code == 200
    assert alone.engine.requests[0]["tenant"] == ""
