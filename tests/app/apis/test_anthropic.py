"""Anthropic's API, with its own client and raw: events, errors, tools, thoughts, usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.protocol.requests import QueueFull
from tests.kits.app_requests import post
from tests.kits.fake_engine import ANSWER

CLAUDE_CODE = json.loads((Path(__file__).parent / "fixtures" / "claude_code.json").read_text())
HEADERS = {"anthropic-version": "2023-06-01"}
USER = [{"role": "user", "content": "Capital of France?"}]
BODY = {"model": "fake", "max_tokens": 100, "messages": USER}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
THINKS = "{{ '</think>' }}"


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def ask(application: Any, body: dict[str, Any], path: str = "/v1/messages", **keywords: Any) -> tuple[int, Any]:
    response, data = await post(application, body, path, **keywords)
    return response.status_code, msgspec.json.decode(data)


async def stream(application: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked against their types."""
    response, data = await post(application, {**body, "stream": True}, "/v1/messages")
    assert response.status_code == 200
    out = []
    for block in data.decode().strip().split("\n\n"):
        name, line = block.split("\n")
        event = msgspec.json.decode(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        out.append(event)
    return out


def text_of(events: list[dict[str, Any]], field: str) -> str:
    return "".join(event["delta"].get(field, "") for event in events if event["type"] == "content_block_delta")


async def test_an_answer_has_the_form_of_a_message(application) -> None:
    status, answer = await ask(application, BODY)
    assert status == 200
    assert answer.pop("id").startswith("msg_")
    prompt = len("user: Capital of France?\n")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "".join(ANSWER)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": prompt - prompt // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt // 2,
            "output_tokens": len(ANSWER),
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


async def test_a_stream_has_a_block_of_text(application) -> None:
    events = await stream(application, BODY)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:-3] == ["content_block_delta"] * len(ANSWER)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len("user: Capital of France?\n")
    assert text_of(events, "text") == "".join(ANSWER)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ANSWER)


@pytest.mark.parametrize("streamed", [False, True])
async def test_thought_text_and_calls_are_blocks_in_their_order(application, engine, streamed: bool) -> None:
    engine.chat_template = THINKS
    engine.answer = pieces(f"<think>Hm.</think>\n\nLook:\n{CALL}\n{CALL}")
    body = {**BODY, "tools": [TOOL]}
    if streamed:
        events = await stream(application, body)
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert stops == [0, 1, 2, 3]
        assert text_of(events, "thinking") == "Hm."
        assert text_of(events, "signature")
        assert text_of(events, "text") == "Look:\n"
        assert text_of(events, "partial_json") == '{"a": 1}' * 2
        assert [block["input"] for block in blocks[2:]] == [{}, {}]
        reason = events[-2]["delta"]["stop_reason"]
    else:
        _, answer = await ask(application, body)
        blocks, reason = answer["content"], answer["stop_reason"]
        assert blocks[0]["thinking"] == "Hm."
        assert blocks[0]["signature"]
        assert blocks[1]["text"] == "Look:\n"
        assert [block["input"] for block in blocks[2:]] == [{"a": 1}] * 2
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert {block["name"] for block in blocks[2:]} == {"add"}
    assert reason == "tool_use"


@pytest.mark.parametrize("streamed", [False, True])
async def test_white_space_before_a_call_is_no_block(application, engine, streamed: bool) -> None:
    engine.answer = pieces("\n\n" + CALL, 1)
    body = {**BODY, "tools": [TOOL]}
    if streamed:
        events = await stream(application, body)
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    else:
        blocks = (await ask(application, body))[1]["content"]
    assert [block["type"] for block in blocks] == ["tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_thought_may_be_omitted(application, engine, streamed: bool) -> None:
    engine.chat_template = THINKS
    engine.answer = pieces("<think>Hm.</think>So.")
    body = {**BODY, "thinking": {"type": "adaptive", "display": "omitted"}}
    if streamed:
        events = await stream(application, body)
        assert (text_of(events, "thinking"), text_of(events, "text")) == ("", "So.")
        assert text_of(events, "signature")
    else:
        thought, text = (await ask(application, body))[1]["content"]
        assert (thought["thinking"], text["text"]) == ("", "So.")
        assert thought["signature"]


async def test_the_reason_of_an_end_is_named(application, engine) -> None:
    assert (await ask(application, {**BODY, "max_tokens": 2}))[1]["stop_reason"] == "max_tokens"
    engine.matched_stop = "END"
    _, answer = await ask(application, {**BODY, "stop_sequences": ["END"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert engine.requests[-1]["params"].stop == ("END",)
    engine.matched_stop = 7  # a token that ends a turn
    _, answer = await ask(application, BODY)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


async def test_a_cut_call_keeps_what_it_has(application, engine) -> None:
    engine.answer = [*pieces(CALL[:-16]), "x"]
    _, answer = await ask(application, {**BODY, "tools": [TOOL], "max_tokens": len(engine.answer) - 1})
    assert answer["content"][0]["input"] == {"INVALID_JSON": '{"a":'}
    assert answer["stop_reason"] == "max_tokens"


async def test_max_tokens_is_less_where_the_context_ends(application, engine) -> None:
    """The engine's own default takes what fits, and the reason says that the context has ended."""
    await ask(application, {**BODY, "max_tokens": 1_000_000})
    params = engine.requests[-1]["params"]
    assert (params.max_tokens, params.default_max_tokens) == (None, 1_000_000)


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "any"}, "json_schema"),
        ({"type": "tool", "name": "add"}, "json_schema"),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
async def test_a_choice_of_tools_is_enforced(application, engine, choice, kind) -> None:
    engine.answer = pieces(CALL)
    await ask(application, {**BODY, "tools": [TOOL], "tool_choice": choice})
    request = engine.requests[-1]
    assert (request["params"].grammar is not None) == (kind is not None)
    assert (request["prompt"].tools is None) == (choice["type"] == "none")


async def test_parallel_calls_can_be_turned_off(application, engine) -> None:
    engine.answer = pieces(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    _, answer = await ask(application, {**BODY, "tools": [TOOL], "tool_choice": choice})
    assert len(answer["content"]) == 1


async def test_an_answer_may_be_asked_in_a_form(application, engine) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        await ask(application, {**BODY, **fields})
        assert engine.requests[-1]["params"].grammar.text == '{"type":"object"}'
    status, answer = await ask(application, {**BODY, "output_config": {"format": {"type": "xml"}}})
    assert (status, answer["error"]["message"]) == (400, "output_config.format.type: must be json_schema.")


async def test_a_budget_of_thought_is_kept_or_refused(application, engine) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    status, _ = await ask(application, {**BODY, "thinking": thinking})
    assert status == 200  # this model has no thoughts
    assert engine.requests[-1]["prompt"].template_kwargs == {"enable_thinking": True, "thinking": True}


async def test_a_budget_that_cannot_be_kept_is_refused(make_application) -> None:
    application = make_application(reasoning_parser="qwen3")  # whose marks are several tokens of this tokenizer
    status, answer = await ask(application, {**BODY, "thinking": {"type": "enabled", "budget_tokens": 5}})
    assert status == 400
    assert answer["error"]["message"].startswith("thinking.budget_tokens: the tags")


async def test_tokens_are_counted_without_an_answer(application, engine) -> None:
    body = {"model": "fake", "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    status, answer = await ask(application, body, "/v1/messages/count_tokens")
    assert (status, answer) == (200, {"input_tokens": len("system: Be brief.\nuser: Capital of France?\n")})
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/x"])
async def test_a_missing_key_has_anthropics_form(make_application, path: str) -> None:
    application = make_application(api_key="secret")
    client = application.test_client()
    response = await (client.post(path, json=BODY) if "messages" in path else client.get(path, headers=HEADERS))
    answer = msgspec.json.decode(await response.get_data())
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
    assert answer["request_id"] == response.headers["request-id"]
    assert (await post(application, BODY, "/v1/messages", headers={"x-api-key": "secret"}))[0].status_code == 200


async def test_errors_have_anthropics_types(application, engine) -> None:
    async def refused(body: dict[str, Any]) -> tuple[int, str]:
        status, answer = await ask(application, body)
        assert (set(answer), answer["type"]) == ({"type", "error", "request_id"}, "error")
        return status, answer["error"]["type"]

    assert await refused({**BODY, "model": "gpt"}) == (404, "not_found_error")
    assert await refused({**BODY, "max_tokens": 0}) == (400, "invalid_request_error")
    assert await refused({**BODY, "messages": "x" * 40_000_000}) == (413, "request_too_large")
    engine.admission_error = QueueFull("full", retry_after=3)
    assert await refused(BODY) == (429, "rate_limit_error")
    engine.admission_error = RuntimeError("boom")
    assert await refused(BODY) == (500, "api_error")
    engine.admission_error = None
    engine.begin_drain()
    assert await refused(BODY) == (529, "overloaded_error")


async def test_a_stream_that_fails_ends_with_an_error(application, engine) -> None:
    engine.fail_at = 2
    *_, last = await stream(application, BODY)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"].startswith("msg_")


async def test_a_stream_that_waits_sends_pings(make_application, serve) -> None:
    import asyncio

    import anthropic

    application = make_application(sse_keep_alive_interval=0.02)
    application.engine.gate = asyncio.Event()
    client = anthropic.AsyncAnthropic(base_url=await serve(application), api_key="none", max_retries=0)
    async with client, client.messages.with_streaming_response.create(**BODY, stream=True) as response:
        pings = 0
        async for line in response.iter_lines():
            pings += line == "event: ping"
            if pings == 3:
                application.engine.gate.set()
    assert pings >= 3


async def test_models_have_anthropics_form_for_its_clients(make_application) -> None:
    application = make_application(served_model_name=("fake", "claude-x"))
    client = application.test_client()
    page = msgspec.json.decode(await (await client.get("/v1/models?limit=1", headers=HEADERS)).get_data())
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("fake", "fake", True)
    rest = msgspec.json.decode(await (await client.get("/v1/models?after_id=fake", headers=HEADERS)).get_data())
    assert ([model["id"] for model in rest["data"]], rest["has_more"]) == (["claude-x"], False)
    one = msgspec.json.decode(await (await client.get("/v1/models/claude-x", headers=HEADERS)).get_data())
    assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", "claude-x", 4096)
    plain = msgspec.json.decode(await (await client.get("/v1/models")).get_data())
    assert plain["object"] == "list"


async def test_the_anthropic_client_reads_answers_streams_and_errors(application, engine, serve) -> None:
    import anthropic

    engine.chat_template = THINKS
    engine.answer = pieces(f"<think>Hm.</think>Look: {CALL}")
    url = await serve(application)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        sent: dict[str, Any] = {**BODY, "tools": [TOOL]}
        whole = await client.messages.create(**sent)
        async with client.messages.stream(**sent) as events:
            kinds = [event.type async for event in events]
            streamed = await events.get_final_message()
        for message in (whole, streamed):
            thought, text, call = message.content
            assert (thought.type, thought.thinking) == ("thinking", "Hm.")
            assert (text.type, text.text) == ("text", "Look: ")
            assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
            assert message.stop_reason == "tool_use"
        assert streamed.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
        assert {"thinking", "text", "input_json", "message_stop"} <= set(kinds)
        results = [{"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "2"}]
        history = [*USER, whole.to_param(), {"role": "user", "content": results}]
        assert (await client.messages.create(**{**sent, "messages": history})).id
        rendered = engine.requests[-1]["prompt"].messages
        assert [turn["role"] for turn in rendered] == ["user", "assistant", "tool"]
        assert rendered[1]["reasoning_content"] == "Hm."
        counted = await client.messages.count_tokens(model="fake", messages=USER)
        assert counted.input_tokens == len("user: Capital of France?\n")
        assert [model.id async for model in client.models.list()] == ["fake"]
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            await client.messages.create(**{**BODY, "model": "other"})
        engine.admission_error = QueueFull("full", retry_after=3)
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**BODY)


@pytest.mark.parametrize("name", ["turn", "quota", "budget", "title"])
async def test_requests_of_claude_code_are_accepted(application, engine, name: str) -> None:
    path, headers = CLAUDE_CODE["path"], CLAUDE_CODE["headers"]
    response, data = await post(application, CLAUDE_CODE[name], path, headers=headers)
    assert response.status_code == 200, data
    assert "x-ignored-fields" not in response.headers
    chat = engine.requests[-1]["prompt"]
    assert not any("billing" in turn["content"] for turn in chat.messages)
    if name == "turn":
        roles = [turn["role"] for turn in chat.messages]
        assert roles == ["system", "user", "assistant", "tool", "tool", "user"]
        assert chat.messages[4]["content"] == "Error: ls: not found"
        assert chat.template_kwargs == {"reasoning_effort": "medium", "enable_thinking": True, "thinking": True}
        assert len(chat.tools) == len(CLAUDE_CODE["turn"]["tools"])
        assert b"event: message_stop" in data


async def test_claude_codes_tokens_are_counted(application) -> None:
    response, data = await post(application, CLAUDE_CODE["count"], CLAUDE_CODE["count_path"])
    assert response.status_code == 200
    assert msgspec.json.decode(data)["input_tokens"] > 10


async def test_a_server_without_priorities_says_that_it_has_none(application) -> None:
    response, _ = await post(application, {**BODY, "priority": 3}, "/v1/messages")
    assert response.headers["x-ignored-fields"] == "priority"


def test_every_field_of_the_client_is_accepted() -> None:
    """The fields of the client's own request, but for those that are refused by name."""
    from anthropic.types import message_create_params

    from app.apis.anthropic.requests import MessagesRequest
    from app.server.known_fields import KNOWN, NO_EFFECT

    names = set(message_create_params.MessageCreateParamsBase.__annotations__)
    assert names - set(MessagesRequest.__struct_fields__) <= set(KNOWN) | set(NO_EFFECT)
