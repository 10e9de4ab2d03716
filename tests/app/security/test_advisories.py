"""The field's advisories, class by class, held against this server.

S1 to S15 are classes of faults; ids are named where a request, a flag or a file of ours could have the same fault. What
has no counterpart here (media by URL, adapters, embeddings of prompts, grammars) is shown to be absent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from actors.arguments import ArgumentError, Arguments
from actors.chat_template import ChatTemplate
from actors.model_files import ModelFiles, ModelPathError, resolve_model_path
from actors.requests import LIMITS, Chat, InvalidRequest
from actors.runtime import Message
from actors.sampling_rules import slot_sampling
from app import auth
from app.auth import Keyring, Level
from app.errors import ApiError
from app.openai.refusals import REFUSED
from tests.app.security.conftest import ADMIN, USER, Target
from tests.app.security.test_no_dangers import MODULES, modules
from tests.tiny_model import make_tiny_model

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def refused(target: Target, path: str, body: object, param: str) -> None:
    answer = target.post(path, body)
    assert answer.status_code == 400, answer.text[:300]
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.text[:300]


# -- S1: objects that become code when they are read


def test_s1_cve_2025_32444_cve_2026_3059_nothing_unpickles() -> None:
    """Whoever reached a socket of the engine sent a pickle and ran what he liked (also CVE-2025-29783, CVE-2025-30165,
    CVE-2025-10164, CVE-2026-3989 and others)."""
    for file in modules():
        text = file.read_text(encoding="utf-8")
        assert not any(f"import {module}" in text for module in MODULES), file


def test_s1_cve_2026_86793_a_message_between_processes_cannot_name_a_class() -> None:
    """An allow-list of classes was got around; here the receiver's own types are all there is."""
    messages = Message.__subclasses__()
    assert messages
    hostile = msgspec.msgpack.encode({"type": "os.system", "__reduce__": ["os.system", ["id"]]})
    for message in messages:
        with pytest.raises((msgspec.ValidationError, TypeError)):
            msgspec.msgpack.decode(hostile, type=message)


def test_s1_cve_2026_7304_code_of_a_request_is_not_taken(target: Target) -> None:
    """A request brought a serialized logit processor."""
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"text": "x"}),
    ):
        for field in ("custom_logit_processor", "logits_processors"):
            refused(target, path, {**body, field: "gASVIAAAAAA="}, field)


# -- S2: control sockets open to all


def test_s2_cve_2025_30202_cve_2026_7301_nothing_listens_but_the_api(target: Target) -> None:
    """Sockets between the engine's processes listened on every interface."""
    server = psutil.Process(target.server.process.pid)
    port = int(target.url.rpartition(":")[2])
    for process in (server, *server.children(recursive=True)):
        listening = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert all(c.laddr.ip == "127.0.0.1" and c.laddr.port == port for c in listening)
    assert Arguments(model_path="x").host == "127.0.0.1"


# -- S3: what the server fetches for a client


def test_s3_cve_2025_6242_cve_2026_24779_no_url_of_a_request_is_fetched(target: Target) -> None:
    """A URL in a message reached services behind the server, or its files (also CVE-2026-25960, CVE-2026-34753)."""
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.2)
        here = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for url in (here, "file:///etc/passwd", "http://169.254.169.254/", "data:image/png;base64,AAAA"):
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "file", "file": {"file_url": url}},
            ):
                body = {"messages": [{"role": "user", "content": [part]}]}
                refused(target, "/v1/chat/completions", body, "messages[0].content[0].type")
            for field in ("image_data", "video_data", "audio_data"):
                refused(target, "/generate", {"text": "x", field: [url]}, field)
        with pytest.raises(TimeoutError):
            trap.accept()


# -- S4: numbers that cost


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "n": 10**9}, "n"),  # CVE-2026-34756
        ("/v1/completions", {"prompt": "x", "best_of": 10**9}, "best_of"),  # CVE-2024-8939
        ("/v1/completions", {"prompt": ["x"] * 100_000}, "prompt"),  # CVE-2026-73559
        (
            "/v1/completions",
            {"prompt": "x", "logprob_token_ids": [0, 5] * 50_000},
            "logprob_token_ids",
        ),  # CVE-2026-116173
        ("/v1/completions", {"prompt": "x", "n": 128, "max_tokens": 500}, "n"),
        ("/v1/completions", {"prompt": "x", "logprobs": 10**6}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/generate", {"text": ["x"] * 100_000}, "text"),  # CVE-2026-110807
        ("/generate", {"text": "x", "session_params": {"id": "x"}}, "session_params"),  # CVE-2026-110809
        ("/tokenize", {"prompt": ["x"] * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [5] * 1_000_000}, "tokens"),
    ],
)
def test_s4_cve_2026_34756_a_number_is_bounded_before_anything_is_made_of_it(
    target: Target, path: str, body: dict[str, Any], param: str
) -> None:
    """One field asked for so much that the process ran out of memory or time."""
    memory = psutil.Process(target.server.process.pid).memory_info
    before, began = memory().rss, time.monotonic()
    refused(target, path, body, param)
    assert memory().rss - before < 128 << 20
    assert time.monotonic() - began < 5


def test_s4_cve_2025_48956_a_huge_header_is_refused(target: Target) -> None:
    with socket.create_connection(("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 400_000 + b"\r\n\r\n")
        assert b" 200 " not in connection.recv(4096)


def test_s4_cve_2026_114052_tokenizing_leaves_nothing_behind(target: Target) -> None:
    """Each call put an entry into a cache without a bound."""
    process = psutil.Process(target.server.process.pid)

    def ask(times: int) -> None:
        for number in range(times):
            text = f"{number} " * 400
            assert target.post("/tokenize", {"prompt": text}).status_code == 200

    ask(50)
    before = process.memory_info().rss
    ask(300)
    assert process.memory_info().rss - before < 16 << 20


async def test_s4_cve_2026_114052_tokenizing_is_bounded_at_a_time(make_application: Any) -> None:
    application = make_application()
    hold = asyncio.Event()

    async def tokenize(prompt: object, **options: object) -> list[int]:
        await hold.wait()
        return [1]

    application.engine.tokenize = tokenize
    client = application.test_client()
    calls = [
        asyncio.create_task(client.post("/tokenize", json={"prompt": "x"})) for _ in range(LIMITS.text_requests + 5)
    ]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    await asyncio.sleep(0.05)
    early = [call.result() for call in calls if call.done()]
    assert [answer.status_code for answer in early] == [429] * 5
    assert early[0].headers["Retry-After"] == "1"
    hold.set()
    assert sorted([answer.status_code for answer in await asyncio.gather(*calls)])[:-5] == [200] * LIMITS.text_requests


# -- S5: one request ends the engine


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},  # CVE-2024-8768
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [2**31 - 1]},
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
        {"prompt": "x", "guided_regex": "(" * 500},  # CVE-2025-48942, CVE-2025-48943
        {"prompt": "x", "structured_outputs": {"regex": "\\1"}},
        {"prompt": "x", "cache_salt": 5},  # CVE-2026-105756
        {"prompt": "x", "cache_salt": ["a"]},
        {"prompt": "x", "min_tokens": 2**31 - 1},  # CVE-2026-114051
        {"prompt": "x", "stop_token_ids": [-1], "min_tokens": 1},
        {"prompt": "x", "logit_bias": {"-1": 5}},
        {"prompt": "x", "prompt_embeds": [[0.0]]},  # CVE-2025-62164
        {"prompt": "x", "temperature": "hot"},
    ],
    ids=lambda body: json.dumps(body)[:50],
)
def test_s5_cve_2025_48944_cve_2024_8768_a_bad_request_ends_alone(target: Target, body: dict[str, Any]) -> None:
    """A request with one bad value ended every other request with it."""
    answer = target.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


def test_s5_cve_2025_48944_a_bad_tool_is_refused(target: Target) -> None:
    """``pattern`` and ``type`` of a tool's schema went into a compiler unchecked (GHSA-vrq3-r879-7m65)."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "something", "pattern": "(((("}}}
    answer = target.post("/v1/chat/completions", {**CHAT, "tools": [tool]})
    assert answer.status_code in (200, 400)  # shown to the model as text, and never compiled


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2, "stop_token_ids": list(range(128)), "logit_bias": {str(i): -100 for i in range(384)}},
        {"allowed_token_ids": [5], "bad_words": ["a"], "logit_bias": {"5": -100}, "min_tokens": 2},
        {"repetition_penalty": 100, "frequency_penalty": 2, "presence_penalty": 2, "logprobs": 20, "n": 5},
        {"temperature": 1e-38, "top_p": 1e-38, "min_p": 1, "top_k": 1},
        {"temperature": 100, "logit_bias": {str(i): 100 for i in range(384)}, "logprobs": 20, "echo": True},
        {"prompt_logprobs": 20, "logprobs": 0, "echo": True, "n": 3, "max_tokens": 1},
    ],
)
def test_s5_cve_2026_44223_cve_2026_116180_extreme_fields_together_are_answered(
    target: Target, fields: dict[str, Any]
) -> None:
    """Penalties, biases and log-probabilities together divided by nothing or told memory that was never written."""
    answer = target.post("/v1/completions", {"prompt": "once upon", "max_tokens": 4, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        told = [p for p in (choice["logprobs"] or {}).get("token_logprobs", []) if p is not None]
        assert all(p <= 0 for p in told)


# -- S6: patterns and grammars that never end


@pytest.mark.parametrize("field", ["regex", "guided_regex", "stop_regex", "ebnf", "guided_grammar", "json_schema"])
def test_s6_cve_2025_29770_cve_2026_55574_nothing_of_a_request_is_compiled(target: Target, field: str) -> None:
    """Patterns of requests were compiled without a limit on time, and kept without a limit on space."""
    refused(target, "/v1/completions", {"prompt": "x", field: "(a+)+$" * 1000}, field)


def test_s6_pysec_2025_54_stop_strings_are_no_patterns(target: Target) -> None:
    body = {"prompt": "x", "max_tokens": 8, "stop": ["(a|a)*$", "[", "\\", ".*"], "seed": 3}
    assert target.post("/v1/completions", body).status_code == 200


# -- S7: what belongs to another request


def test_s7_cve_2026_105755_a_clients_id_is_a_label_only(target: Target) -> None:
    """Two requests with one X-Request-Id were taken for one."""
    labelled = {"x-request-id": "same", "Content-Type": "application/json"}
    first = target.post("/v1/completions", {"prompt": "once", "max_tokens": 3, "rid": "same"}, headers=labelled)
    second = target.post("/v1/completions", {"prompt": "lazy dog", "max_tokens": 3, "rid": "same"}, headers=labelled)
    assert first.json()["id"] != second.json()["id"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_s7_cve_2026_112266_an_id_aborts_what_it_names_as_a_whole(make_application: Any) -> None:
    """A prefix of an id, or none, aborted the requests of others."""
    application = make_application()
    engine = application.engine
    engine.gate = asyncio.Event()
    client = application.test_client()
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "rid": "request-12"}))
    async with asyncio.timeout(60):
        while not engine.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for rid in ("request-1", "r", "request-123", "*", " request-12"):
        answer = await client.post("/abort_request", json={"rid": rid})
        assert (await answer.get_json())["aborted"] == 0
    engine.gate.set()
    assert (await waiting).status_code == 200


def test_s7_cve_2026_93840_cve_2026_93989_restrictions_hold_for_their_own_request(target: Target) -> None:
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
    refused(target, "/generate", {"text": "x", "mm_hashes": ["0" * 64]}, "mm_hashes")


# -- S8: what the prefix cache tells


def test_s8_cve_2025_46570_salts_keep_prefixes_apart(target: Target) -> None:
    """The time of an answer told whether somebody else had sent the same prompt."""
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
    refused(target, path, {**CHAT, "chat_template": template}, "chat_template")
    refused(target, path, {**CHAT, "chat_template_kwargs": {"chat_template": template}}, "chat_template_kwargs")


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
        refused(target, "/v1/chat/completions", body, f"chat_template_kwargs.{name}")


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


# (CVE-2026-115911, an endless template that holds up everybody's: tests/actors/test_renderer.py.)


# -- S10: doors beside the door


def test_s10_cve_2026_48746_the_host_header_opens_nothing(target: Target) -> None:
    """What was compared with the list of open paths was made from the Host header."""
    import httpx

    for host in ("x/health", "x/live?", "health", "x#/live", "localhost/live/.."):
        answer = httpx.get(f"{target.url}/v1/models", headers={"Host": host}, timeout=60)
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

    assert httpx.post(f"{target.url}{path}", json={}, timeout=60).status_code == 401


def test_s10_administration_is_off_without_its_key(make_application: Any) -> None:
    """Routes for administrators were open to whoever came while no key was set."""
    ring = Keyring(user=("user",))
    with pytest.raises(ApiError):
        ring.check(Level.ADMIN, [(b"x-api-key", b"user")], ("127.0.0.1", 1))
    with pytest.raises(ApiError):
        Keyring().check(Level.ADMIN, [], ("192.168.0.7", 8000))


# -- S11: the time of a comparison


def test_s11_cve_2025_59425_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a wrong key was refused told how much of it was right."""
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
            ring.check(Level.USER, headers, None)
        else:
            with pytest.raises(ApiError):
                ring.check(Level.USER, headers, None)
        assert compared == [(given, b"one"), (given, b"two"), (given, b"three")]


# -- S12: paths that a client chooses


def test_s12_cve_2026_7302_no_path_of_a_client_reaches_a_file(target: Target) -> None:
    for path in (
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/page/../../pyproject.toml",
        "/page/..%2f..%2f..%2fpyproject.toml",
        "/page/%2e%2e/index.html",
        "/page//etc/passwd",
        "/page/x\\..\\..\\app.py",
        "/v1/models/../../../etc/passwd",
        "/static/../app/auth.py",
    ):
        with socket.create_connection(("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=10) as connection:
            connection.sendall(
                f"GET {path} HTTP/1.1\r\nHost: x\r\nx-api-key: user-key\r\nConnection: close\r\n\r\n".encode()
            )
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert int(answer.split()[1]) in (400, 404), (path, answer[:200])
        assert b"root:" not in answer
        assert b"[project]" not in answer


@pytest.mark.parametrize("name", ["../../etc", "/etc", "..", "tiny/../../x", "C:\\x", "file:///etc/passwd", "\x00"])
def test_s12_a_models_name_is_compared_and_never_opened(target: Target, name: str) -> None:
    answer = target.post("/v1/completions", {"model": name, "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


# -- S13: code and pointers in a checkpoint


def test_s13_cve_2025_66448_cve_2026_27893_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """``auto_map`` of a checkpoint named a file of code, and it was fetched and run."""
    model = make_tiny_model(tmp_path / "model")
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')"
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.T"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(code)
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    files = ModelFiles(model)
    from actors.text_codec import TextCodec

    TextCodec(files)
    assert not marker.exists()
    with pytest.raises(ArgumentError, match="code"):
        Arguments.from_keywords(model=str(model), trust_remote_code=True)


def test_s13_cve_2026_54232_a_name_that_is_a_path_is_not_looked_up_elsewhere(tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "../gone/model"):
        with pytest.raises(ModelPathError):
            resolve_model_path(name)


def test_s13_weights_are_safetensors_only(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="safetensors"):
        Arguments.from_keywords(model=str(tmp_path), load_format="pt")


def test_s13_cve_2026_41523_what_guards_is_no_assertion() -> None:
    """``assert`` is gone under ``python -O``; so a check of a client's input must not be one."""
    import ast

    for file in modules():
        name = file.as_posix()
        if "/app/auth" in name or "/app/decoding" in name or "sampling_rules" in name or "/app/door" in name:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], name


# -- S14: what errors tell


async def test_s14_cve_2026_22778_errors_tell_no_address_and_no_path(
    make_application: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An error's text held an address of the heap, which made the next attack easy (also CVE-2026-54236)."""
    application = make_application()
    secret = f"{object()!r} at /root/models"
    application.engine.ready_error = RuntimeError(secret)
    with caplog.at_level(logging.ERROR, logger="troupe.http"):
        answer = await application.test_client().post("/v1/completions", json={"prompt": "x"})
    text = (await answer.get_data()).decode()
    assert answer.status_code == 500
    assert "0x" not in text
    assert "/root" not in text
    assert "RuntimeError" not in text
    told = json.loads(text)["error"]["message"]
    record = next(record for record in caplog.records if record.exc_info)
    assert told.rpartition("under ")[2].rstrip(".") in record.getMessage()  # the reference leads to the log


def test_s14_values_of_a_request_are_not_told_back_whole(target: Target) -> None:
    for body in (
        {"prompt": "x", "model": "y" * 500},
        {"prompt": "x", "y" * 1000: 1, "temperature": "y" * 100_000},
        {"prompt": "x", "logit_bias": {"y" * 100_000: 1}},
    ):
        assert len(target.post("/v1/completions", body).text) < 1000


def test_s14_the_servers_keys_are_told_to_nobody(target: Target) -> None:
    for path in ("/server_info", "/model_info", "/metrics", "/openapi.json", "/v1/loads", "/health"):
        text = target.client.get(path, headers=ADMIN).text
        assert "user-key" not in text
        assert "admin-key" not in text
    log = target.server.log.read_text()
    assert USER["x-api-key"] not in log
    assert ADMIN["x-api-key"] not in log


# -- S15: answers of the model that become code


def test_s15_cve_2025_9141_nothing_evaluates_what_a_model_wrote(target: Target) -> None:
    """A parser of tool calls evaluated the model's text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "__import__('os').system('id')"}}
    body = {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}  # type: ignore[misc]
    assert target.post("/v1/chat/completions", body).status_code == 200


# -- and all of them


def test_every_unbuilt_field_is_refused_and_not_swallowed(target: Target) -> None:
    for field in sorted(REFUSED - {"functions", "function_call", "chat_template", "reasoning"}):
        body = {**CHAT, field: {"anything": [1]}}
        refused(target, "/v1/chat/completions", body, field)


def test_a_seed_beyond_64_bits_makes_no_other_seed() -> None:
    """Choices of one request have seeds of their own, within 64 bits."""
    from actors.requests import SamplingParams

    seeds = {slot_sampling(SamplingParams(), index=i, seed=2**64 - 1).seed for i in range(128)}
    assert len(seeds) == 128
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_nothing_was_harmed(target: Target) -> None:
    target.assert_unharmed()
