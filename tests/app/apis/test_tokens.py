"""Tokens, information and levers; the API's own description."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import Gauge

from actors.protocol.requests import LIMITS, InvalidRequest
from app.route_table import ROUTES

LOCAL = {"server": ("127.0.0.1", 8000)}


async def call(application, path, method="POST", **keywords):
    response = await application.test_client().open(path, method=method, scope_base=LOCAL, **keywords)
    data = await response.get_data()
    return response.status_code, msgspec.json.decode(data) if data[:1] in (b"{", b"[") else data


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(application, prefix):
    status, reported = await call(application, f"{prefix}/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert status == 200
    assert reported == {"tokens": [97, 98], "count": 2, "max_model_len": 4096, "token_strs": ["a", "b"]}
    _, reported = await call(application, f"{prefix}/tokenize", json={"prompt": ["a", "bc"]})
    assert (reported["tokens"], reported["count"]) == ([[97], [98, 99]], [1, 2])
    _, reported = await call(application, f"{prefix}/detokenize", json={"tokens": [97, 98]})
    assert reported == {"text": "ab", "prompt": "ab", "content": "ab"}
    _, reported = await call(application, f"{prefix}/detokenize", json={"tokens": [[97], [98]]})
    assert reported["text"] == ["a", "b"]


async def test_an_id_that_is_no_token_is_reported_under_its_field(application, engine, monkeypatch):
    async def refuse(ids, *, skip_special_tokens=True):
        raise InvalidRequest("prompt holds token id 9.", param="prompt")

    monkeypatch.setattr(engine, "detokenize", refuse)
    status, reported = await call(application, "/detokenize", json={"tokens": [9]})
    assert (status, reported["error"]["param"]) == (400, "tokens")
    assert reported["error"]["message"] == "tokens holds token id 9."


async def test_tokenize_a_conversation(application):
    body = {"messages": [{"role": "user", "content": "x"}]}
    _, reported = await call(application, "/tokenize", json=body)
    assert reported["count"] == len("user: x\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
        ("/abort_request", {}, "rid"),
    ],
)
async def test_bad_fields_are_named(application, path, body, param):
    status, reported = await call(application, path, json=body)
    assert (status, reported["error"]["param"]) == (400, param)


async def test_tokenizer_info_for_lm_eval(make_application, tmp_path):
    config = {
        "eos_token": {"content": "<end>", "special": True},
        "bos_token": None,
        "chat_template": "{{ messages }}",
        "auto_map": {"x": "y"},
    }
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    status, reported = await call(make_application(model_path=str(tmp_path)), "/tokenizer_info", "GET")
    assert status == 200
    assert (reported["eos_token"], reported["chat_template"]) == ("<end>", "{{ messages }}")
    assert "auto_map" not in reported


async def test_the_cache_is_not_flushed_under_running_requests(application, engine):
    engine.gate = asyncio.Event()
    stream = engine.generate("x", request_id="r")
    assert (await call(application, "/flush_cache"))[0] == 409
    await stream.aclose()
    assert (await call(application, "/flush_cache"))[0] == 200
    assert engine.flushed == 1


async def test_drain_by_request(application, engine):
    assert await call(application, "/drain") == (202, {"status": "draining", "in_flight": 0})
    assert (await call(application, "/ready", "GET"))[0] == 503


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_hides_keys(make_application, path):
    application = make_application(api_key="very-secret")
    headers = {"x-api-key": "very-secret"}
    status, reported = await call(application, path, "GET", headers=headers)
    assert status == 200
    assert reported["workers"] == [{"pid": 4242, "device": "cpu", "restarts": 0, "state": "running"}]
    assert reported["arguments"]["api_key"] == "***"
    assert "very-secret" not in str(reported)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info(application, path):
    status, reported = await call(application, path, "GET")
    assert status == 200
    assert (reported["model_path"], reported["weight_version"], reported["is_generation"]) == (
        "/models/fake",
        "default",
        True,
    )


async def test_metrics_are_the_engines(application, engine):
    status, text = await call(application, "/metrics", "GET")
    assert status == 200
    assert b"troupe_http_requests" in text


async def test_metrics_keep_their_names_for_a_scraper_that_prefers_openmetrics(application, engine):
    Gauge("vllm:num_requests_running", "Sequences that run.", registry=engine.registry)
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    _, text = await call(application, "/metrics", "GET", headers=accept)
    assert b"\nvllm:num_requests_running 0.0\n" in text


async def test_loads_and_version(application):
    status, reported = await call(application, "/v1/loads", "GET")
    assert (status, reported["dp_rank_count"], [each["dp_rank"] for each in reported["loads"]]) == (200, 2, [0, 1])
    assert reported["aggregate"]["total_waiting_reqs"] == reported["aggregate"]["total_reqs"] == 1
    assert (reported["aggregate"]["total_used_tokens"], reported["aggregate"]["total_tokens"]) == (20, 21)
    assert (reported["aggregate"]["avg_token_usage"], reported["aggregate"]["avg_utilization"]) == (0.1, 0.5)
    _, one = await call(application, "/v1/loads?dp_rank=1", "GET")
    assert [each["num_waiting_reqs"] for each in one["loads"]] == [1]
    assert (await call(application, "/v1/loads?dp_rank=2", "GET"))[0] == 400
    _, older = await call(application, "/get_load", "GET")
    assert [(each["dp_rank"], each["num_reqs"], each["num_pending_tokens"]) for each in older] == [(0, 0, 0), (1, 1, 1)]
    assert "version" in (await call(application, "/version", "GET"))[1]


async def test_openapi_reports_what_answers_come_as(application):
    _, reported = await call(application, "/openapi.json", "GET")
    media = {
        path: set(next(iter(item.values()))["responses"]["200"]["content"]) for path, item in reported["paths"].items()
    }
    for path in ("/", "/docs", "/metrics", "/v1/models", "/live", "/version"):
        response = await application.test_client().get(path)
        assert media[path] == {response.headers["Content-Type"].partition(";")[0]}, path
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert media[path] == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    ("keys", "user", "admin"),
    [
        ({}, [], []),
        ({"api_key": "u", "admin_api_key": "a"}, [{"user": []}], [{"admin": []}]),
        ({"admin_api_key": "a"}, [], [{"admin": []}]),
    ],
)
async def test_openapi_asks_for_the_keys_that_this_server_has(make_application, keys, user, admin):
    application = make_application(**keys)
    response = await application.test_client().get("/openapi.json", headers={"x-api-key": "u"})
    paths = msgspec.json.decode(await response.get_data())["paths"]
    assert paths["/v1/models"]["get"]["security"] == user
    assert paths["/flush_cache"]["post"]["security"] == admin
    assert paths["/live"]["get"]["security"] == []


async def test_openapi_describes_every_route(application):
    status, reported = await call(application, "/openapi.json", "GET")
    assert status == 200
    described = {(method.upper(), path) for path, methods in reported["paths"].items() for method in methods}
    assert described == {(method, route.path) for route in ROUTES for method in route.methods}
    assert "are returned as tool_calls" in " ".join(reported["info"]["description"].split())
    chat = reported["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert "max_completion_tokens" in chat["properties"]
    text = msgspec.json.encode(reported).decode()
    for reference in {part.partition('"')[0] for part in text.split('"$ref":"#/components/schemas/')[1:]}:
        assert reference in reported["components"]["schemas"]


async def test_the_description_for_people_loads_nothing_from_elsewhere(application):
    status, page = await call(application, "/docs", "GET")
    assert status == 200
    assert b"<!doctype html>" in page
    assert b"http://" not in page
    assert b"https://" not in page
    assert b"/v1/chat/completions" in page
    assert b"max_completion_tokens" in page
    assert b"<code>separate_reasoning</code>" in page
    assert b"`" not in page


async def test_one_key_cannot_keep_the_tokenizer_to_itself(make_application, until):
    application = make_application(api_key="one,two")
    engine = application.engine
    hold, encode = asyncio.Event(), engine.tokenize

    async def held(prompt, **keywords):
        await hold.wait()
        return await encode(prompt, **keywords)

    engine.tokenize = held

    async def post(key):
        headers = {"Authorization": f"Bearer {key}"}
        answer = await application.test_client().post("/tokenize", json={"prompt": "x"}, headers=headers)
        return answer.status_code

    flood = [asyncio.create_task(post("one")) for _ in range(LIMITS.text_requests)]
    await until(lambda: sum(task.done() for task in flood) == LIMITS.text_requests // 4)
    other = [asyncio.create_task(post("two")) for _ in range(LIMITS.text_requests // 4)]
    hold.set()
    assert set(await asyncio.gather(*other)) == {200}
    assert sorted(await asyncio.gather(*flood))[-1] == 429
