"""POST /set_trace_level at a server that traces, and at one that does not."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from app.cli.command import main

ADMIN = {"Authorization": "Bearer admin"}


async def set_level(application, query="", **keywords):
    response = await application.test_client().post(f"/set_trace_level{query}", headers=ADMIN, **keywords)
    return response.status_code, msgspec.json.decode(await response.get_data())


async def test_without_traces_there_is_no_level(make_application):
    status, answer = await set_level(make_application(admin_api_key="admin"), "?level=2")
    assert status == 409
    assert answer["error"]["code"] == "tracing_disabled"
    assert "--enable-trace" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("query", "body", "status", "level"),
    [
        ("?level=3", None, 200, 3),
        ("", {"level": 0}, 200, 0),
        ("?level=3", {"level": 2}, 200, 2),
        ("", None, 400, 1),
        ("?level=x", None, 400, 1),
        ("", {"level": 4}, 400, 1),
        ("", {"level": -1}, 400, 1),
    ],
)
async def test_the_level_is_set_or_refused(make_application, query, body, status, level):
    application = make_application(admin_api_key="admin")
    application.engine.tracing = SimpleNamespace(level=1)
    given = {} if body is None else {"json": body}
    answered, answer = await set_level(application, query, **given)
    assert answered == status
    assert application.engine.tracing.level == level
    if status == 400:
        assert answer["error"]["param"] == "level"


def test_traces_without_an_exporter_are_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("telemetry.traces.export.is_installed", lambda: False)
    monkeypatch.setattr("app.cli.command._configure_logging", lambda arguments: None)
    assert main(["serve", "--enable-trace", "--port", "0"]) == 2
    answer = capsys.readouterr().err
    assert "--enable-trace needs the OTLP exporters: pip install 'troupe-llm[otlp]'" in answer
    assert "Traceback" not in answer
