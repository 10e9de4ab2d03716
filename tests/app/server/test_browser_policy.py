"""Which pages of a browser may call the server: the Host header, origins, preflights."""

from __future__ import annotations

import asyncio
import socket

import h2.config
import h2.connection
import h2.events
import httpx
import msgspec
import pytest

from actors.options import ArgumentError, Arguments
from app.server.browser_policy import BrowserPolicy
from tests.kits.waiting import PATIENCE

PAGE = "http://chat.example:3000"
EVIL = "http://evil.example"


@pytest.fixture
async def client(make_application, serve):
    """Makes a client of a real server with these arguments."""
    clients = []

    async def make(**keywords):
        application = make_application(**keywords)
        made = httpx.AsyncClient(base_url=await serve(application), timeout=PATIENCE)
        made.application = application  # type: ignore[attr-defined]
        clients.append(made)
        return made

    yield make
    for made in clients:
        await made.aclose()


# -- the Host header


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[::1]"],
)
async def test_hosts_that_no_stranger_can_bind_are_accepted(client, host):
    answer = await (await client()).get("/v1/models", headers={"Host": host})
    assert answer.status_code == 200


async def test_the_machines_own_name_and_that_of_host_are_accepted(client):
    browser = await client(host="llm.lan")
    for host in ("llm.lan:8000", f"{socket.gethostname()}:8000"):
        assert (await browser.get("/v1/models", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "2130706433", "x:y:z"],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/flush_cache"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/no")]
)
async def test_a_page_with_a_rebound_name_is_refused_without_a_key(client, host, method, path):
    browser = await client()
    answer = await browser.request(method, path, headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]
    assert browser.application.engine.flushed == 0


async def test_http2s_authority_is_checked_as_the_host(client):
    address = (await client()).base_url

    async def status(authority: str) -> bytes:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        connection.initiate_connection()
        head = [(":method", "POST"), (":path", "/flush_cache"), (":scheme", "http"), (":authority", authority)]
        connection.send_headers(connection.get_next_available_stream_id(), head, end_stream=True)
        writer.write(connection.data_to_send())
        try:
            while data := await asyncio.wait_for(reader.read(1 << 16), PATIENCE):
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        return dict(event.headers)[b":status"]
        finally:
            writer.close()
        raise AssertionError("the connection ended without an answer")

    assert await status("evil.example") == b"403"
    assert await status("127.0.0.1") == b"200"


async def test_probes_answer_under_any_name(client):
    browser = await client(allowed_hosts=("llm.example",))
    for path in ("/live", "/ready", "/health"):
        assert (await browser.get(path, headers={"Host": "balancer.example"})).status_code == 200


async def test_allowed_hosts_are_accepted_and_wildcards_cover_what_is_below(client):
    browser = await client(allowed_hosts=("llm.example", "*.lab.example"))
    statuses = {}
    for host in ("llm.example", "a.lab.example", "a.b.lab.example", "lab.example", "xlab.example", "other.example"):
        statuses[host] = (await browser.get("/v1/models", headers={"Host": host})).status_code
    assert list(statuses.values()) == [200, 200, 200, 403, 403, 403], statuses
    assert (await (await client(allowed_hosts=("*",))).get("/v1/models", headers={"Host": "any"})).status_code == 200


async def test_with_a_key_every_host_is_accepted_unless_hosts_are_given(client):
    headers = {"Host": "proxy.example", "x-api-key": "user-key"}
    behind_proxy = await client(api_key="user-key")
    for path in ("/v1/models", "/", "/page/main.js"):
        assert (await behind_proxy.get(path, headers=headers)).status_code == 200
    strict = await client(api_key="user-key", allowed_hosts=("llm.example",))
    assert (await strict.get("/v1/models", headers=headers)).status_code == 403
    admin_only = await client(admin_api_key="admin-key")  # whose user routes are open
    assert (await admin_only.get("/v1/models", headers=headers)).status_code == 403


# -- pages of other origins


@pytest.mark.parametrize("headers", [{"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}])
async def test_a_foreign_page_cannot_send_what_needs_no_preflight(client, headers):
    browser = await client()
    for path in ("/flush_cache", "/drain", "/v1/completions"):
        answer = await browser.post(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
        assert "--allowed-origins" in answer.json()["error"]["message"]
    assert browser.application.engine.status.phase == "ready"


async def test_the_servers_own_page_is_no_foreign_one(client):
    browser = await client()
    host = f"{browser.base_url.host}:{browser.base_url.port}"
    for headers in ({"Origin": f"http://{host}"}, {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}):
        assert (await browser.post("/flush_cache", headers=headers)).status_code == 200


async def test_admin_paths_take_pages_of_origins_by_name_only(client):
    named = await client(allowed_origins=(PAGE,))
    assert (await named.post("/flush_cache", headers={"Origin": PAGE})).status_code == 200
    anybody = await client(allowed_origins=("*",))
    assert (await anybody.post("/flush_cache", headers={"Origin": PAGE})).status_code == 403
    assert (await anybody.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": PAGE})).status_code == 200


# -- CORS


def preflight(origin: str = PAGE, headers: str = "authorization,content-type,x-stainless-lang") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": headers,
    }


async def test_without_allowed_origins_no_page_is_granted_anything(client):
    browser = await client(api_key="user-key")
    answer = await browser.options("/v1/chat/completions", headers=preflight())
    assert answer.status_code == 403
    assert "--allowed-origins" in answer.json()["error"]["message"]
    answer = await browser.get("/v1/models", headers={"Origin": PAGE, "x-api-key": "user-key"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_preflight_of_an_allowed_page_needs_no_key(client):
    browser = await client(api_key="user-key", allowed_origins=(PAGE,))
    answer = await browser.options("/v1/chat/completions", headers=preflight())
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-lang"
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers
    other = await browser.options("/v1/chat/completions", headers=preflight(EVIL))
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_errors_are_readable_by_an_allowed_page(client, stream):
    browser = await client(api_key="user-key", allowed_origins=(PAGE, "https://two.example"))
    body = {"prompt": "hi", "stream": stream}
    for key, status in (("user-key", 200), ("wrong", 401)):
        headers = {"Origin": PAGE, "Authorization": f"Bearer {key}", "x-request-id": "mine"}
        answer = await browser.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-troupe-request-id", "content-type"} <= set(exposed)


async def test_all_origins_are_answered_with_a_star(client):
    browser = await client(allowed_origins=("*",))
    answer = await browser.get("/v1/models", headers={"Origin": EVIL})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert (await browser.options("/v1/models", headers=preflight(EVIL))).status_code == 204


async def test_methods_headers_and_credentials_are_granted_as_requested(client):
    browser = await client(
        allowed_origins=(PAGE,),
        allowed_methods=("get", "POST"),
        allowed_headers=("Authorization", "X-Mine"),
        allow_credentials=True,
    )
    answer = await browser.options("/v1/models", headers=preflight())
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["access-control-allow-headers"] == "Authorization, X-Mine"
    assert answer.headers["access-control-allow-credentials"] == "true"


async def test_a_preflight_echoes_no_odd_header_name(client):
    browser = await client(allowed_origins=(PAGE,))
    answer = await browser.options("/v1/models", headers=preflight(headers="x-good, b@d, <script>, x-two"))
    assert answer.headers["access-control-allow-headers"] == "x-good, x-two"


# -- arguments


def test_origins_and_hosts_are_read_in_vllms_form():
    arguments = Arguments.from_keywords(
        model="m", allowed_origins='["http://a.example", "null"]', allowed_hosts="a.example, b.example"
    )
    assert arguments.allowed_origins == ("http://a.example", "null")
    assert arguments.allowed_hosts == ("a.example", "b.example")
    assert Arguments.from_keywords(model="m", allowed_methods='["*"]').allowed_methods == ("*",)


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"allowed_hosts": ["http://x"]}, "without scheme and port"),
        ({"allowed_hosts": ["x:8000"]}, "without scheme and port"),
        ({"allowed_origins": ["chat.example"]}, "give scheme, name and port"),
        ({"allowed_origins": ["http://a.example/path"]}, "give scheme, name and port"),
        ({"allowed_origins": '["x'}, "must be words"),
        ({"allowed_methods": ["GET"]}, "needs allowed_origins"),
        ({"allowed_headers": ["a b"], "allowed_origins": [PAGE]}, "is not a name"),
        ({"allow_credentials": True}, "needs allowed_origins"),
        ({"allow_credentials": True, "allowed_origins": ["*"]}, "each by name"),
    ],
)
def test_what_cannot_be_meant_is_refused(keywords, problem):
    with pytest.raises(ArgumentError, match=problem):
        Arguments.from_keywords(model="m", **keywords)


async def test_an_error_is_one_json_object_whatever_the_host_holds(client):
    answer = await (await client()).get("/v1/models", headers={"Host": '<b>"x"</b>'})
    assert answer.status_code in (400, 403)
    if answer.status_code == 403:
        assert msgspec.json.decode(answer.content)["error"]["code"] == "host_not_allowed"


def test_a_refusal_shows_little_of_a_name_and_in_ascii():
    policy, name = BrowserPolicy(Arguments(model_path="m")), "\u00e9\x1b" * 4000
    origin = (b"origin", f"http://{name}".encode("latin-1"))
    for refusal in (
        policy.check_host([(b"host", name.encode("latin-1"))], keyed=False),
        policy.check_page("POST", [origin], keyed=False, admin=False),
        policy.preflight([origin, (b"access-control-request-method", b"POST")]),
    ):
        assert refusal is not None
        assert refusal.message.isascii()
        assert refusal.message.isprintable()
        assert len(refusal.message) < 1000
