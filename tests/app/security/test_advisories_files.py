"""The field's advisories, S12 to S15: paths, checkpoints, errors and answers; and all of them. See test_advisories."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from actors.options import ArgumentError, Arguments
from actors.requests.sampling_rules import slot_sampling
from actors.text.model_files import ModelFiles, ModelPathError, resolve_model_path
from app.apis.openai.requests import ChatRequest
from app.server.field_screen import known_fields
from app.server.known_fields import KNOWN
from tests.kits.dangers import modules
from tests.kits.target import ADMIN, CHAT, USER, Target
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import PATIENCE

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
        "/static/../app/server/auth.py",
    ):
        with socket.create_connection(
            ("127.0.0.1", int(target.url.rpartition(":")[2])), timeout=PATIENCE
        ) as connection:
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
    from actors.text.text_codec import TextCodec

    TextCodec(files)
    assert not marker.exists()
    assert not Arguments.from_keywords(model=str(model)).trust_remote_code


def test_s13_cve_2026_54232_a_path_as_a_name_is_not_looked_up_elsewhere(tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "../gone/model"):
        with pytest.raises(ModelPathError):
            resolve_model_path(name)


def test_s13_weights_are_safetensors_only(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="safetensors"):
        Arguments.from_keywords(model=str(tmp_path), load_format="pt")


def test_s13_cve_2026_41523_what_guards_is_no_assertion() -> None:
    """``assert`` is gone under ``python -O``; so a check of a client's input must not be one."""
    import ast

    names = ("auth.py", "browser_policy.py", "decoding.py", "middleware.py", "field_screen.py", "sampling_rules.py")
    guards = [file for file in modules() if file.name in names]
    assert len(guards) == len(names)
    for file in guards:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], file


# -- S14: what errors tell


async def test_s14_cve_2026_22778_errors_reveal_no_address_and_no_path(
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
    reported = json.loads(text)["error"]["message"]
    record = next(record for record in caplog.records if record.exc_info)
    assert reported.rpartition("under ")[2].rstrip(".") in record.getMessage()  # the reference leads to the log


def test_s14_values_of_a_request_are_not_returned_whole(target: Target) -> None:
    for body in (
        {"prompt": "x", "model": "y" * 500},
        {"prompt": "x", "y" * 1000: 1, "temperature": "y" * 100_000},
        {"prompt": "x", "logit_bias": {"y" * 100_000: 1}},
    ):
        assert len(target.post("/v1/completions", body).text) < 1000


def test_s14_the_servers_keys_are_never_revealed(target: Target) -> None:
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
    code = "__import__('os').system('id')"
    for arguments, status in ((code, 400), (f'{{"a": "{code}"}}', 200)):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}  # type: ignore[misc]
        assert target.post("/v1/chat/completions", body).status_code == status


# -- and all of them


def test_every_unbuilt_field_is_refused_and_not_swallowed(target: Target) -> None:
    for field in sorted(KNOWN.keys() - known_fields(ChatRequest)):
        body = {**CHAT, field: {"anything": [1]}}
        target.refuses("/v1/chat/completions", body, field)


def test_a_seed_beyond_64_bits_makes_no_other_seed() -> None:
    """Choices of one request have seeds of their own, within 64 bits."""
    from actors.protocol.requests import SamplingParams

    seeds = {slot_sampling(SamplingParams(), index=i, seed=2**64 - 1).seed for i in range(128)}
    assert len(seeds) == 128
    assert all(0 <= seed < 2**64 for seed in seeds)
