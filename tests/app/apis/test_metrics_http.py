from __future__ import annotations

import json

import msgspec
import pytest

from actors.options import Arguments
from app.application import create_app
from app.server.custom_labels import custom_labels
from tests.kits.fake_engine import FakeEngine

LOCAL = {"server": ("127.0.0.1", 8000)}


def arguments(**values: object) -> Arguments:
    return Arguments(model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, **values)


async def test_without_metrics_their_path_reports_it():
    engine = FakeEngine(arguments(enable_metrics=False))
    response = await create_app(engine.arguments, engine).test_client().get("/metrics", scope_base=LOCAL)
    answer = msgspec.json.decode(await response.get_data())
    assert (response.status_code, answer["error"]["code"]) == (404, "metrics_disabled")
    assert "--no-enable-metrics" in answer["error"]["message"]


async def test_a_requests_labels_come_with_its_header():
    engine = FakeEngine(arguments(tokenizer_metrics_allowed_custom_labels=("team", "tier")))
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    header = {"X-Custom-Labels": json.dumps({"team": "red", "secret": "x"})}
    client = create_app(engine.arguments, engine).test_client()
    response = await client.post("/v1/chat/completions", json=body, headers=header, scope_base=LOCAL)
    assert response.status_code == 200
    assert engine.timelines.recent[0].request == {"troupe.label.team": "red"}


@pytest.mark.parametrize("given", [b"", b"{", b"[1]", b'"red"', b'{"team": ["red"]}', b"\xff", b"{" * 5000])
def test_a_header_that_is_no_object_of_values_is_ignored(given):
    allowed = arguments(tokenizer_metrics_allowed_custom_labels=("team",))
    assert custom_labels([(b"x-custom-labels", given)], allowed) == {}


def test_only_the_named_header_and_the_allowed_labels_count():
    headers = [(b"x-labels", b'{"team": "' + b"r" * 100 + b'", "n": 7}'), (b"x-custom-labels", b'{"team": "blue"}')]
    chosen = arguments(
        tokenizer_metrics_allowed_custom_labels=("team", "n", "absent"),
        tokenizer_metrics_custom_labels_header="X-Labels",
    )
    assert custom_labels(headers, chosen) == {"troupe.label.team": "r" * 64, "troupe.label.n": "7"}
    assert custom_labels(headers, arguments()) == {}
