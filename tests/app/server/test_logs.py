"""What a server writes: the access log, formats, secrets, and what clients cannot put into it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import app
from actors.options import ArgumentError, Arguments
from app.server.logs import log_output
from telemetry.logs.output import LogOutput, install
from telemetry.logs.request_log import RequestLog

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
KEY, OTHER, ADMIN = "sk-the-users-key", "sk-another-users-key", "sk-the-admins-key"
COMPLETION = {"prompt": "a private prompt", "max_tokens": 3}


class Server:
    """An application and the log it writes."""

    def __init__(self, application: Any, output: LogOutput, stream: io.StringIO) -> None:
        self.application = application
        self.engine = application.engine
        self._output = output
        self._stream = stream

    async def call(self, path: str, method: str = "GET", **keywords: Any) -> int:
        keywords.setdefault("scope_base", {"server": ("127.0.0.1", 8000)})
        response = await self.application.test_client().open(path, method=method, **keywords)
        await response.get_data()
        return int(response.status_code)

    @property
    def log(self) -> str:
        self._output.flush()
        return self._stream.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.log.splitlines()


@pytest.fixture
def server(
    make_application: Callable[..., Any], restore_loggers: Callable[..., None]
) -> Iterator[Callable[..., Server]]:
    """A server whose log is as these arguments say."""
    restore_loggers(
        "troupe", "troupe.http", "troupe.server", "troupe.requests", "hypercorn.error", "app", "opentelemetry.exporter"
    )
    outputs = []

    def make(**keywords: Any) -> Server:
        application = make_application(**keywords)
        arguments: Arguments = application.engine.arguments
        if arguments.log_requests:
            application.engine.timelines.listen(RequestLog(level=arguments.log_requests_level))
        stream = io.StringIO()
        output = log_output(arguments, stream)
        outputs.append(output)
        install(output, level=arguments.log_level, http_level=arguments.log_level_http, others=("app",))
        return Server(application, output, stream)

    yield make
    for output in outputs:
        output.close()


async def test_a_request_is_one_line_and_probes_are_none(server: Callable[..., Server]) -> None:
    running = server(log_requests=True)
    for path in ("/health", "/ready", "/live", "/ping", "/metrics", "/health_generate"):
        await running.call(path)
    assert running.lines == []
    headers = {"traceparent": TRACE, "x-request-id": "client-1"}
    await running.call("/v1/completions", "POST", json=COMPLETION, headers=headers)
    line, _ = sorted(running.lines, key=lambda line: "request ended" in line)
    assert " INFO    troupe.http: POST /v1/completions 200 done " in line
    assert " label=client-1 tokens=16+3" in line
    assert f"trace_id={'a' * 32}" in line
    assert "private" not in line
    assert running.log.count("request ended") == 1


async def test_the_same_as_json(server: Callable[..., Server]) -> None:
    running = server(log_format="json")
    await running.call("/v1/completions", "POST", json=COMPLETION, headers={"traceparent": TRACE})
    (line,) = running.lines
    reported = json.loads(line)
    assert reported["trace_id"] == "a" * 32
    assert reported["request_id"].startswith("cmpl-")
    assert (reported["logger"], reported["level"], reported["method"]) == ("troupe.http", "info", "POST")
    assert (reported["path"], reported["status"], reported["outcome"]) == ("/v1/completions", 200, "done")


async def test_records_of_a_handler_carry_the_requests_id(server: Callable[..., Server]) -> None:
    running = server(log_format="json", log_level="error")
    running.engine.admission_error = RuntimeError("boom")
    assert await running.call("/v1/completions", "POST", json=COMPLETION) == 500
    (line,) = running.lines
    reported = json.loads(line)
    assert reported["request_id"] in reported["message"]
    assert reported["exception"].endswith("RuntimeError: boom")


async def test_levels(server: Callable[..., Server]) -> None:
    running = server(log_level="info", log_level_http="warning")
    await running.call("/v1/models")
    logging.getLogger("troupe.engine").info("the engine speaks")
    assert [line.partition("troupe.")[2] for line in running.lines] == ["engine: the engine speaks"]


async def test_excluded_prefixes_are_not_listed(server: Callable[..., Server]) -> None:
    running = server(access_log_exclude_prefixes=("/v1/mod", "/nothing"))
    for path in ("/v1/models", "/nothing/here"):
        await running.call(path)
    assert running.lines == []
    await running.call("/something/else")
    assert len(running.lines) == 1


async def test_log_requests_adds_the_engines_line_in_its_format(server: Callable[..., Server]) -> None:
    running = server(log_requests=True, log_requests_level=1, log_requests_format="json")
    await running.call("/v1/completions", "POST", json=COMPLETION | {"temperature": 0.5})
    await running.call("/v1/completions", "POST", data=b"no json", headers={"content-type": "application/json"})
    requests = [json.loads(line) for line in running.lines if line.startswith("{")]
    access = [line for line in running.lines if not line.startswith("{")]
    assert [reported["message"] for reported in requests] == ["request ended"] * 2
    assert all("troupe.http: POST /v1/completions" in line for line in access)
    assert all(reported["request_id"] in line for reported, line in zip(requests, access, strict=True))
    assert requests[1]["error_type"]
    assert "private" not in running.log


async def test_without_it_there_is_no_such_line(server: Callable[..., Server]) -> None:
    running = server()
    await running.call("/v1/completions", "POST", json=COMPLETION)
    assert "request ended" not in running.log


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_keys_and_texts_stay_out_at_every_level(server: Callable[..., Server], log_format: str) -> None:
    running = server(api_key=f"{KEY},{OTHER}", admin_api_key=ADMIN, log_level="debug", log_format=log_format)
    running.engine.answer = ["a", " private", " answer"]
    wrong = "sk-a-wrong-key"
    for key in (KEY, OTHER, ADMIN, wrong):
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            chat = {"messages": [{"role": "user", "content": "a private prompt"}], "unknown_field": "private"}
            await running.call("/v1/completions", "POST", json=COMPLETION, headers=headers)
            await running.call("/v1/chat/completions", "POST", json=chat | {"stream": True}, headers=headers)
            await running.call("/v1/chat/completions", "POST", json=chat | {"temperature": -1}, headers=headers)
            await running.call(f"/server_info?api_key={key}", headers=headers)
            running.engine.admission_error = RuntimeError("boom")
            await running.call("/v1/completions", "POST", json=COMPLETION, headers=headers)
            running.engine.admission_error = None
    logging.getLogger("troupe.http").warning("a proxy sent %s", OTHER)  # where somebody logs one all the same
    assert len(running.lines) > 30
    for hidden in (KEY, OTHER, ADMIN, wrong, "Bearer", "private"):
        assert hidden not in running.log
    assert KEY not in repr(running.engine.arguments)


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_client_writes_a_line_of_its_own(server: Callable[..., Server], log_format: str) -> None:
    running = server(log_format=log_format, log_requests=True, log_requests_level=3)
    nasty = "x\n2026-11-21 00:00:00,000 ERROR   troupe: forged\r\x1b[2J\x9b31m\u2028"
    escaped = "x%0A2026-11-21%2000:00:00,000%20ERROR%20%20%20troupe:%20forged%0D%1B%5B2J%E2%80%A8"
    headers = {"x-request-id": "a\tb", "user-agent": "\x1b[31mforged"}
    body = {"model": nasty, "prompt": nasty, "user": nasty, nasty: 1}
    await running.call(f"/{escaped}", headers=headers)
    await running.call(f"/v1/models/{escaped}", headers=headers)
    await running.call("/v1/completions", "POST", json=body, headers=headers)
    await running.call("/v1/completions", "POST", json={**body, "model": None}, headers=headers)
    await running.call("/generate", "POST", json={"text": nasty, "rid": nasty}, headers=headers)
    running.engine.admission_error = ValueError(nasty)
    await running.call("/v1/completions", "POST", json={"prompt": "x"}, headers=headers)
    assert "forged" in running.log
    for line in running.log.split("\n")[:-1]:
        assert line.isprintable(), line
        if log_format == "json":
            json.loads(line)
        else:
            assert line.startswith("    | ") or " troupe." in line[:50]
            assert "00:00:00,000" not in line[:24]


def test_an_asgi_server_gets_logs_unless_they_are_set_up(
    monkeypatch: pytest.MonkeyPatch, restore_loggers: Callable[..., None], tiny_model: Path
) -> None:
    restore_loggers("troupe", "troupe.http", "troupe.server", "hypercorn.error", "opentelemetry.exporter")
    monkeypatch.setenv("TROUPE_ARGS", f"--model-path {tiny_model} --log-level error")
    logger = logging.getLogger("troupe")
    assert logger.hasHandlers()  # the tests' own, at the root
    app._application.__wrapped__()
    assert logger.handlers == []
    monkeypatch.setattr(logger, "propagate", False)
    app._application.__wrapped__()
    (output,) = logger.handlers
    assert isinstance(output, LogOutput)
    assert logger.level == logging.ERROR
    assert output not in logging.getLogger("hypercorn.error").handlers
    output.close()


def test_arguments_that_would_do_nothing_are_refused() -> None:
    for keywords in ({"log_requests_level": 1}, {"log_requests_format": "json"}):
        with pytest.raises(ArgumentError, match="needs log_requests"):
            Arguments(model_path="m", **keywords)
    assert Arguments.from_keywords(model_path="m", enable_log_requests=True).log_requests
    assert Arguments.from_keywords(uvicorn_access_log_exclude_prefixes="/a,/b").access_log_exclude_prefixes == (
        "/a",
        "/b",
    )
