"""The field's advisories, class by class, held against this server.

S1 to S15 are classes of faults; S1 to S6, what a request can make of the server, are here. Ids are named where a
request, a flag or a file of ours could have the same fault. What has no counterpart here (media by URL, adapters,
embeddings of prompts, grammars) is shown to be absent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any

import msgspec
import psutil
import pytest

from actors.options import Arguments
from actors.protocol.requests import LIMITS
from actors.runtime import Message
from tests.kits.dangers import MODULES, modules
from tests.kits.target import CHAT, Target
from tests.kits.waiting import PATIENCE, until

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
            target.refuses(path, {**body, field: "gASVIAAAAAA="}, field)


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
                target.refuses("/v1/chat/completions", body, "messages[0].content[0].type")
            for field in ("image_data", "video_data", "audio_data"):
                target.refuses("/generate", {"text": "x", field: [url]}, field)
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
def test_s4_cve_2026_34756_a_number_is_bounded_before_it_is_used(
    target: Target, path: str, body: dict[str, Any], param: str
) -> None:
    """One field asked for so much that the process ran out of memory or time."""
    process = psutil.Process(target.server.process.pid)
    before, began = process.memory_info().rss, process.cpu_times().user
    target.refuses(path, body, param)
    assert process.memory_info().rss - before < 128 << 20
    assert process.cpu_times().user - began < 5


def test_s4_cve_2025_48956_a_huge_header_is_refused(target: Target) -> None:
    with socket.create_connection(("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 400_000 + b"\r\n\r\n")
        assert b" 200 " not in connection.recv(4096)


def test_s4_cve_2026_114052_tokenizing_leaves_nothing_behind(target: Target) -> None:
    """Each call put an entry into a cache without a bound."""
    process = psutil.Process(target.server.process.pid)

    numbers = itertools.count()

    def growth() -> int:
        """Of the process's memory by 50 calls."""
        before = process.memory_info().rss
        for _ in range(50):
            assert target.post("/tokenize", {"prompt": f"{next(numbers)} " * 400}).status_code == 200
        return process.memory_info().rss - before

    # What is left behind grows with each round; what the allocator keeps does not.
    assert any(growth() < 2 << 20 for _ in range(10))


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
    await until(lambda: sum(call.done() for call in calls) >= 5)
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
def test_s5_cve_2026_44223_cve_2026_116180_extreme_fields_are_answered(target: Target, fields: dict[str, Any]) -> None:
    """Penalties, biases and log-probabilities together divided by zero or returned memory that was never written."""
    answer = target.post("/v1/completions", {"prompt": "once upon", "max_tokens": 4, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        reported = [p for p in (choice["logprobs"] or {}).get("token_logprobs", []) if p is not None]
        assert all(p <= 0 for p in reported)


# -- S6: patterns and grammars that never end


@pytest.mark.parametrize("field", ["regex", "guided_regex", "stop_regex", "ebnf", "guided_grammar", "json_schema"])
def test_s6_cve_2025_29770_cve_2026_55574_nothing_of_a_request_is_compiled(target: Target, field: str) -> None:
    """Patterns of requests were compiled without a limit on time, and kept without a limit on space."""
    target.refuses("/v1/completions", {"prompt": "x", field: "(a+)+$" * 1000}, field)


def test_s6_pysec_2025_54_stop_strings_are_no_patterns(target: Target) -> None:
    body = {"prompt": "x", "max_tokens": 8, "stop": ["(a|a)*$", "[", "\\", ".*"], "seed": 3}
    assert target.post("/v1/completions", body).status_code == 200
