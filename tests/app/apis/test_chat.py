"""POST /v1/chat/completions, by the test client and by openai's own."""

from __future__ import annotations

import msgspec
import openai
import pytest

from actors.protocol.requests import CompilerBusy, InvalidRequest, QueueFull, RequestFailed
from tests.kits.app_requests import BODY, MESSAGES, events, post


async def test_an_answer_at_once(application, engine):
    response, data = await post(application, BODY)
    answer = msgspec.json.decode(data)
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris is the capital of France.", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
            "stop_reason": None,
            "matched_stop": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] is None
    assert answer["id"] == response.headers["x-request-id"] == engine.requests[0]["request_id"]  # for its log
    assert answer["id"].startswith("chatcmpl-")
    assert not engine.open


async def test_a_streamed_answer(application, engine):
    response, data = await post(application, {**BODY, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    received = events(data)
    assert received[-1] == "[DONE]"
    assert received[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in received[:-2]) == "".join(engine.answer)
    assert [e["choices"][0]["finish_reason"] for e in received[:-2]] == [None] * 6 + ["stop"]
    assert all(e["usage"] is None for e in received[:-2])
    assert received[-2]["choices"] == []
    assert received[-2]["usage"]["total_tokens"] == received[-2]["usage"]["prompt_tokens"] + 6
    assert not engine.open


async def test_usage_in_every_chunk(application):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, data = await post(application, {**BODY, "stream": True, "stream_options": options})
    counts = [e["usage"]["completion_tokens"] for e in events(data)[:-1]]
    assert counts == [1, 1, 2, 3, 4, 5, 6, 6]


async def test_several_choices_stream_under_their_own_index(application, engine):
    _, data = await post(application, {**BODY, "n": 2, "stream": True})
    texts = {0: "", 1: ""}
    for event in events(data)[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "".join(engine.answer), 1: "".join(engine.answer)}


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_accepts_everything_strictly(application, serve, stream):
    url = await serve(application)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)
    async with client:
        answer = await client.chat.completions.create(
            model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2, seed=1, stream=stream
        )
        if stream:
            text = ""
            reasons = []
            async for chunk in answer:
                if chunk.choices[0].index == 0:
                    text += chunk.choices[0].delta.content or ""
                    reasons.append(chunk.choices[0].finish_reason)
            assert reasons[-1] == "stop"
        else:
            text = answer.choices[0].message.content
            assert answer.choices[1].logprobs.content[0].token == "Paris"
            assert answer.choices[1].logprobs.content[0].top_logprobs[0].logprob == -0.5
        assert text == "Paris is the capital of France."
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"


async def test_parameters_reach_the_engine(application, engine):
    extras = {
        "max_completion_tokens": 3,
        "max_tokens": 9,
        "temperature": 1,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop": "END",
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["bad"],
        "allowed_token_ids": [1, 2],
        "logit_bias": {"5": -1},
        "logprobs": True,
        "cache_salt": "tenant",
        "rid": "mine",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    _, data = await post(application, {**BODY, **extras}, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    request = engine.requests[0]
    params = request["params"]
    assert (params.max_tokens, params.temperature, params.top_k, params.min_p) == (3, 1.0, 5, 0.1)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (7,), {5: -1.0})
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert (params.bad_words, params.allowed_token_ids, params.logprobs) == (("bad",), (1, 2), 0)
    assert (request["cache_salt"], request["request_id"]) == ("tenant", "mine")
    assert request["traceparent"].startswith("00-aaaa")
    assert request["prompt"].template_kwargs == {"enable_thinking": False}
    assert msgspec.json.decode(data)["choices"][0]["finish_reason"] == "length"


async def test_ids_of_tokens_are_returned_on_request(application):
    for requested in (True, False):
        body = {**BODY, "max_tokens": 2, "return_token_ids": requested}
        answer = msgspec.json.decode((await post(application, body))[1])
        assert answer["choices"][0].get("token_ids") == ([1000, 1001] if requested else None)
        assert ("prompt_token_ids" in answer) is requested
        _, data = await post(application, {**body, "stream": True})
        chunks = [msgspec.json.decode(block.removeprefix("data: ")) for block in data.decode().split("\n\n")[:-2]]
        ids = [chunk["choices"][0]["token_ids"] for chunk in chunks if "token_ids" in chunk["choices"][0]]
        assert ids == ([[1000], [1001]] if requested else [])


async def test_a_requests_own_template_reaches_a_server_that_trusts_it(make_application):
    application = make_application(trust_request_chat_template=True)
    await post(application, {**BODY, "chat_template": "{{ messages }}"})
    await post(application, {**BODY, "chat_template": ""})
    assert [request["prompt"].template for request in application.engine.requests] == ["{{ messages }}", None]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "us er", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"regex": "a+", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs.__class__"),
        ({"lora_path": "x"}, "lora_path"),
        ({"guided_json": "{"}, "guided_json"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields_are_named(application, engine, change, param, stream):
    response, data = await post(application, {**BODY, "stream": stream, **change})
    error = msgspec.json.decode(data)["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert not engine.open


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, "low"),
        ({"reasoning": {}}, None),
        ({"reasoning": None}, None),
    ],
)
async def test_both_spellings_of_the_reasoning_effort(application, engine, fields, effort):
    response, _ = await post(application, {**BODY, **fields})
    assert response.status_code == 200
    assert engine.requests[0]["prompt"].template_kwargs.get("reasoning_effort") == effort


async def test_limits_on_thinking_are_not_swallowed(application, engine):
    response, data = await post(application, {**BODY, "reasoning": {"effort": "low", "max_tokens": 5}})
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["param"]) == (400, "reasoning.max_tokens")
    assert "max_tokens" in error["message"]


async def test_a_conversation_that_is_too_long_is_reported_as_messages(application, engine):
    engine.ready_error = InvalidRequest("The prompt has 9 tokens.", param="prompt")
    response, data = await post(application, BODY)
    assert (response.status_code, msgspec.json.decode(data)["error"]["param"]) == (400, "messages")


async def test_neutral_values_of_refused_fields_pass(application):
    neutral = {
        "response_format": {"type": "text"},
        "best_of": 1,
        "lora_path": None,
        "guided_json": None,
        "user": "u",
        "metadata": {"a": "b"},
    }
    response, _ = await post(application, {**BODY, **neutral, "stop": None, "logprobs": None})
    assert response.status_code == 200


async def test_what_only_chats_have_is_no_unknown_field_elsewhere(application, engine):
    await post(application, {"prompt": "a", "parallel_tool_calls": False}, "/v1/completions")
    await post(application, {"text": "a", "parallel_tool_calls": False}, "/generate")
    assert engine.registry.get_sample_value("troupe_unknown_fields_total", {"field": "parallel_tool_calls"}) is None
    assert len(engine.requests) == 2


async def test_unknown_fields_are_counted_and_ignored(application, engine):
    for _ in range(2):
        response, _ = await post(application, {**BODY, "wibble": 1, "we ird": 2})
        assert response.status_code == 200
    value = engine.registry.get_sample_value
    assert value("troupe_unknown_fields_total", {"field": "wibble"}) == 2
    assert value("troupe_unknown_fields_total", {"field": "other"}) == 2


async def test_messages_are_rendered_as_templates_expect(application, engine):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    await post(application, {**BODY, "messages": messages, "tools": tools, "tool_choice": "auto"})
    chat = engine.requests[0]["prompt"]
    assert chat.messages[0] == {"role": "system", "content": "a\nb"}
    assert chat.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"k": 1}}
    assert chat.messages[2]["content"] == ""
    assert chat.tools == tools


async def test_errors_found_late_are_still_statuses(application, engine):
    engine.ready_error = InvalidRequest("max_tokens: too long.", param="max_tokens")
    response, data = await post(application, {**BODY, "stream": True, "max_completion_tokens": 5})
    assert response.status_code == 400
    assert msgspec.json.decode(data)["error"]["param"] == "max_completion_tokens"


async def test_a_full_queue_has_a_retry_after(application, engine):
    engine.admission_error = QueueFull("The queue is full.", retry_after=400.0)
    response, data = await post(application, BODY)
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "120"
    assert msgspec.json.decode(data)["error"]["code"] == "queue_full"


async def test_a_backlog_of_grammars_is_a_503_with_retry_after(application, engine):
    engine.ready_error = CompilerBusy("64 grammars wait to be compiled.", retry_after=5.0)
    response, data = await post(application, BODY)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert msgspec.json.decode(data)["error"]["code"] == "grammar_backlog"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_go_on_names_its_field(application, engine, stream):
    engine.fail_at = 2
    engine.stream_error = InvalidRequest("the grammar cannot go on", param="grammar", code="grammar_failed")
    body = {**BODY, "stream": stream, "response_format": {"type": "json_object"}}
    response, data = await post(application, body)
    error = events(data)[-2]["error"] if stream else msgspec.json.decode(data)["error"]
    assert response.status_code == (200 if stream else 422)
    assert "x-should-retry" not in response.headers
    assert (error["param"], error["code"]) == ("response_format", "grammar_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_never_cuts_a_stream(application, engine, stream):
    engine.fail_at = 2
    engine.stream_error = RequestFailed("secret detail")
    response, data = await post(application, {**BODY, "stream": stream})
    assert b"secret" not in data
    if stream:
        assert response.status_code == 200
        received = events(data)
        assert received[-2]["error"]["type"] == "server_error"
        assert received[-2]["error"]["retryable"] is True
        assert received[-1] == "[DONE]"
    else:
        assert response.status_code == 500
        assert response.headers["x-request-id"] in msgspec.json.decode(data)["error"]["message"]
    assert not engine.open
