"""The field's advisories, S7 to S11: data of other clients, and other ways in. See test_advisories."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import pytest

from actors.protocol.requests import Chat, InvalidRequest
from actors.text.chat_template import ChatTemplate
from app.server import auth
from app.server.auth import AccessLevel, Keyring
from app.server.errors import ApiError
from tests.kits.target import CHAT, Target
from tests.kits.waiting import PATIENCE, until

# -- S7: what belongs to another request


def test_s7_cve_2026_105755_a_clients_id_is_a_label_only(target: Target) -> None:
    """Two requests with one X-Request-Id were taken for one."""
    labelled = {"x-request-id": "same", "Content-Type": "application/json"}
    first = target.post("/v1/completions", {"prompt": "once", "max_tokens": 3, "rid": "same"}, headers=labelled)
    second = target.post("/v1/completions", {"prompt": "lazy dog", "max_tokens": 3, "rid": "same"}, headers=labelled)
    assert first.json()["id"] != second.json()["id"]
    assert first.headers["x-troupe-request-id"] != second.headers["x-troupe-request-id"]


async def test_s7_cve_2026_112266_an_id_aborts_what_it_names_as_a_whole(make_application: Any) -> None:
    """A prefix of an id, or none, aborted the requests of others."""
    application = make_application()
    engine = application.engine
    engine.gate = asyncio.Event()
    client = application.test_client()
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "rid": "request-12"}))
    await until(lambda: engine.open)
    for rid in ("request-1", "r", "request-123", "*", " request-12"):
        answer = await client.post("/abort_request", json={"rid": rid})
        assert (await answer.get_json())["aborted"] == 0
    engine.gate.set()
    assert (await waiting).status_code == 200


def test_s7_cve_2026_93840_cve_2026_93989_limits_hold_for_their_request(target: Target) -> None:
    """Allowed and banned tokens of one request were applied to its neighbours in the batch."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(extra: dict[str, Any]) -> list[int]:
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        choice = target.post("/v1/completions", {**body, **extra}).json()["choices"][0]
        found: list[int] = choice["token_ids"]
        return found

    alone = ask({})
    bans = [{"allowed_token_ids": [9]}, {}, {"logit_bias": {str(alone[0]): -100}}, {}] * 4
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, bans))
    for extra, found in zip(bans, together, strict=True):
        if "allowed_token_ids" in extra:
            assert found == [9] * 12
        elif extra:
            assert alone[0] not in found
        else:
            assert found == alone


def test_s7_cve_2026_111392_no_hash_of_a_client_names_cached_content(target: Target) -> None:
    target.refuses("/generate", {"text": "x", "mm_hashes": ["0" * 64]}, "mm_hashes")


# -- S8: what the prefix cache tells


def test_s8_cve_2025_46570_salts_keep_prefixes_apart(target: Target) -> None:
    """The time of an answer revealed whether another client had sent the same prompt."""
    body = {"text": "the same words again and again " * 8, "sampling_params": {"max_new_tokens": 1}}

    def cached(salt: str) -> int:
        found: int = target.post("/generate", {**body, "cache_salt": salt}).json()["meta_info"]["cached_tokens"]
        return found

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


# -- S9: templates


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/tokenize"])
def test_s9_cve_2025_61620_a_template_of_a_request_is_refused(target: Target, path: str) -> None:
    """A request's own template, or one smuggled in by chat_template_kwargs, was rendered."""
    template = "{% for i in range(10**9) %}{% endfor %}"
    target.refuses(path, {**CHAT, "chat_template": template}, "chat_template")
    target.refuses(path, {**CHAT, "chat_template_kwargs": {"chat_template": template}}, "chat_template_kwargs")


def test_s9_cve_2025_62426_template_arguments_cannot_be_the_servers_own(target: Target) -> None:
    """``tokenize`` and other arguments of the renderer could be set by a request."""
    for name in (
        "tokenize",
        "messages",
        "tools",
        "add_generation_prompt",
        "padding",
        "return_tensors",
        "raise_exception",
    ):
        body = {**CHAT, "chat_template_kwargs": {name: True}}
        target.refuses("/v1/chat/completions", body, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ ('{0.__class__}').format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{{ self.__init__.__globals__ }}",
        "{% set x = messages.pop() %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_s9_cve_2026_5760_a_template_stays_in_its_sandbox(source: str) -> None:
    """A template reached Python's own objects, and with them a shell."""
    try:
        text = ChatTemplate(source, {}).render(Chat(messages=[{"role": "user", "content": "hi"}]))
    except (InvalidRequest, ValueError):
        return
    assert text == "", text


# (CVE-2026-115911, an endless template that holds up everybody's: tests/actors/text/test_renderer.py.)


# -- S10: other ways in


def test_s10_cve_2026_48746_the_host_header_opens_nothing(target: Target) -> None:
    """What was compared with the list of open paths was made from the Host header."""
    import httpx

    for host in ("x/health", "x/live?", "health", "x#/live", "localhost/live/.."):
        answer = httpx.get(f"{target.url}/v1/models", headers={"Host": host}, timeout=PATIENCE)
        assert answer.status_code in (400, 401)


@pytest.mark.parametrize(
    "path",
    [
        "/invocations",
        "/tokenize",
        "/generate",
        "/pooling",
        "/score",
        "/rerank",
        "/abort_request",
        "/flush_cache",
        "/drain",
    ],
)
def test_s10_no_path_is_outside_the_keys(target: Target, path: str) -> None:
    """Only paths that began with ``/v1`` wanted a key."""
    import httpx

    assert httpx.post(f"{target.url}{path}", json={}, timeout=PATIENCE).status_code == 401


def test_s10_administration_is_off_without_its_key(make_application: Any) -> None:
    """Routes for administrators were open to whoever came while no key was set."""
    ring = Keyring(user=("user",))
    with pytest.raises(ApiError):
        ring.check(AccessLevel.ADMIN, [(b"x-api-key", b"user")], ("127.0.0.1", 1))
    with pytest.raises(ApiError):
        Keyring().check(AccessLevel.ADMIN, [], ("192.168.0.7", 8000))


# -- S11: the time of a comparison


def test_s11_cve_2025_59425_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a wrong key was refused revealed how much of it was right."""
    compared: list[tuple[bytes, bytes]] = []
    same = hmac.compare_digest

    def digest(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return same(left, right)

    monkeypatch.setattr(auth.hmac, "compare_digest", digest)
    ring = Keyring(user=("one", "two"), admin=("three",))
    for given, right in ((b"one", True), (b"nothing", False)):
        compared.clear()
        headers = [(b"authorization", b"Bearer " + given)]
        if right:
            ring.check(AccessLevel.USER, headers, None)
        else:
            with pytest.raises(ApiError):
                ring.check(AccessLevel.USER, headers, None)
        assert compared == [(given, b"one"), (given, b"two"), (given, b"three")]


# -- and after all of them


def test_nothing_was_harmed(target: Target) -> None:
    target.assert_unharmed()
