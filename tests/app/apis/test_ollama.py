"""Ollama's API, with its own client and raw: lines, options, tools, thoughts, facts of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import ollama
import pytest

from app.application import Troupe
from tests.kits.app_requests import post
from tests.kits.fake_engine import ANSWER

USER = [{"role": "user", "content": "Capital of France?"}]
BODY = {"model": "fake", "messages": USER}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
THINKS = "{{ '</think>' }}"


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def ask(application: Any, path: str, body: dict[str, Any], **keywords: Any) -> tuple[int, Any]:
    """The status and the answer: the lines of a stream, or the object."""
    response, data = await post(application, body, path, **keywords)
    if response.content_type.startswith("application/x-ndjson"):
        return response.status_code, [msgspec.json.decode(line) for line in data.splitlines()]
    return response.status_code, msgspec.json.decode(data)


async def refusal(application: Any, path: str, body: dict[str, Any]) -> str:
    status, answer = await ask(application, path, body)
    assert status == 400, answer
    assert set(answer) == {"error"}
    return answer["error"]


async def test_a_chat_is_a_stream_of_lines(application) -> None:
    status, lines = await ask(application, "/api/chat", BODY)
    assert status == 200
    assert "".join(line["message"]["content"] for line in lines) == "".join(ANSWER)
    assert [line["done"] for line in lines] == [False] * len(ANSWER) + [True]
    last = lines[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (
        "stop", len("user: Capital of France?\n"), len(ANSWER),
    )  # fmt: skip
    assert last["total_duration"] >= last["eval_duration"] >= 0


async def test_a_whole_chat_has_the_counts(application) -> None:
    _, answer = await ask(application, "/api/chat", {**BODY, "stream": False})
    assert answer["message"] == {"role": "assistant", "content": "".join(ANSWER)}
    assert (answer["done"], answer["done_reason"], answer["eval_count"]) == (True, "stop", len(ANSWER))


@pytest.mark.parametrize("streamed", [False, True])
async def test_thoughts_and_calls_are_apart(application, engine, streamed: bool) -> None:
    engine.chat_template = THINKS
    engine.answer = pieces(f"<think>Hm.</think>Look: {CALL}")
    _, answer = await ask(application, "/api/chat", {**BODY, "tools": [TOOL], "think": True, "stream": streamed})
    messages = [line["message"] for line in answer] if streamed else [answer["message"]]
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."
    assert "".join(message["content"] for message in messages) == "Look: "
    [call] = [call for message in messages for call in message.get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}}
    assert engine.requests[-1]["prompt"].template_kwargs == {"enable_thinking": True, "thinking": True}


async def test_options_are_parameters(application, engine) -> None:
    options = {
        "num_predict": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["a", "b"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 4096, "num_keep": 4,
    }  # fmt: skip
    response, _ = await post(application, {**BODY, "options": {**options, "num_thread": 8}}, "/api/chat")
    params = engine.requests[-1]["params"]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (3, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 5, ("a", "b"), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert response.headers["x-ignored-fields"] == "options.num_thread"
    await post(application, {**BODY, "options": {"num_predict": -1, "seed": -1}}, "/api/chat")
    params = engine.requests[-1]["params"]
    assert (params.max_tokens, params.seed) == (None, None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mirostat": 2}, "options.mirostat"),
        ({"typical_p": 0.7}, "options.typical_p"),
        ({"num_ctx": 1_000_000}, "options.num_ctx"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "options.repeat_last_n"),
        ({"temperature": -1}, "options.temperature"),
        ({"num_predict": 0}, "options.num_predict"),
    ],
)
async def test_an_option_that_cannot_be_kept_is_named(application, options: dict[str, Any], field: str) -> None:
    assert (await refusal(application, "/api/chat", {**BODY, "options": options})).startswith(field)


async def test_a_repeated_range_without_a_penalty_is_taken(application) -> None:
    assert (await ask(application, "/api/chat", {**BODY, "options": {"repeat_last_n": 64}}))[0] == 200


async def test_answers_may_be_asked_in_a_form(application, engine) -> None:
    await ask(application, "/api/chat", {**BODY, "format": "json"})
    assert engine.requests[-1]["params"].grammar.kind == "json_object"
    await ask(application, "/api/generate", {"model": "fake", "prompt": "x", "format": {"type": "object"}})
    assert engine.requests[-1]["params"].grammar.text == '{"type":"object"}'
    await ask(application, "/api/chat", {**BODY, "format": ""})
    assert engine.requests[-1]["params"].grammar is None
    assert (await refusal(application, "/api/chat", {**BODY, "format": "xml"})).startswith("format:")


async def test_results_of_tools_find_their_calls_by_name(application, engine) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("add", "now")]
    history = [
        *USER,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "now", "content": "12"},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]
    await ask(application, "/api/chat", {**BODY, "messages": history, "tools": [TOOL]})
    _, called, first, second = engine.requests[-1]["prompt"].messages
    ids = {call["function"]["name"]: call["id"] for call in called["tool_calls"]}
    assert called["reasoning_content"] == "Hm."
    assert (first["tool_call_id"], second["tool_call_id"]) == (ids["now"], ids["add"])


async def test_generate_is_one_turn_or_a_raw_text(application, engine) -> None:
    body = {"model": "fake", "prompt": "Hi", "stream": False}
    _, answer = await ask(application, "/api/generate", {**body, "system": "Be brief."})
    assert answer["response"] == "".join(ANSWER)
    assert [turn["role"] for turn in engine.requests[-1]["prompt"].messages] == ["system", "user"]
    await ask(application, "/api/generate", {**body, "raw": True})
    assert engine.requests[-1]["prompt"] == "Hi"
    status, lines = await ask(application, "/api/generate", {"model": "fake", "prompt": "Hi"})
    assert (status, "".join(line["response"] for line in lines)) == (200, "".join(ANSWER))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"template": "x"}, "template"),
        ({"context": [1]}, "context"),
        ({"images": ["aGk="]}, "images"),
        ({"suffix": "x"}, "suffix"),
        ({"raw": True, "system": "x"}, "system"),
        ({"think": True}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_what_generate_lacks_is_named(application, fields: dict[str, Any], field: str) -> None:
    body = {"model": "fake", "prompt": "Hi", **fields}
    assert (await refusal(application, "/api/generate", body)).startswith(f"{field}:")


async def test_a_text_is_filled_in_by_the_template(make_application, tmp_path) -> None:
    template = tmp_path / "fill.jinja"
    template.write_text("<P>{{ prompt }}<S>{{ suffix }}<M>")
    application = make_application(completion_template=str(template))
    await ask(application, "/api/generate", {"model": "fake", "prompt": "a", "suffix": "b"})
    assert application.engine.requests[-1]["prompt"] == "<P>a<S>b<M>"


async def test_a_body_is_read_whatever_its_media_type(application) -> None:
    data = msgspec.json.encode({**BODY, "stream": False})
    response = await application.test_client().post("/api/chat", data=data)
    assert response.status_code == 200
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    response = await application.test_client().post("/api/chat", data=data, headers=form)
    assert response.status_code == 200
    foreign = {**form, "Origin": "http://elsewhere.example"}
    response = await application.test_client().post("/api/chat", data=data, headers=foreign)
    assert response.status_code == 403
    response = await application.test_client().post("/v1/chat/completions", data=data, headers=form)
    assert response.status_code == 415
    assert "add -H 'Content-Type: application/json'" in (await response.get_json())["error"]["message"]
    response = await application.test_client().post("/v1/chat/completions", data=data)
    assert response.status_code == 415


async def test_images_of_a_message_are_refused(application) -> None:
    message = {"role": "user", "content": "x", "images": ["aGk="]}
    assert (await refusal(application, "/api/chat", {**BODY, "messages": [message]})).startswith("messages[0].images:")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_request_without_a_prompt_says_that_the_model_is_loaded(application, engine, path: str) -> None:
    _, answer = await ask(application, path, {"model": "fake", "keep_alive": "10m"})
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert engine.requests == []
    assert (await refusal(application, path, {"model": "fake", "keep_alive": 0})).startswith("keep_alive:")


async def test_log_probabilities_come_with_their_tokens(application) -> None:
    body = {**BODY, "logprobs": True, "top_logprobs": 1}
    _, lines = await ask(application, "/api/chat", body)
    scored = [entry for line in lines for entry in line.get("logprobs", ())]
    assert [entry["token"] for entry in scored] == ANSWER
    assert scored[0]["top_logprobs"][0]["logprob"] == -0.5
    _, answer = await ask(application, "/api/chat", {**body, "stream": False})
    assert answer["logprobs"] == scored


async def test_a_name_may_have_the_tag_latest(application) -> None:
    status, answer = await ask(application, "/api/chat", {**BODY, "model": "fake:latest", "stream": False})
    assert (status, answer["model"]) == (200, "fake:latest")
    status, answer = await ask(application, "/api/chat", {**BODY, "model": "other:latest"})
    assert (status, set(answer)) == (404, {"error"})


async def test_embeddings_need_a_model_for_them(application) -> None:
    for path, body in (("/api/embed", {"input": ["a", "b"]}), ("/api/embeddings", {"prompt": "a"})):
        message = await refusal(application, path, {"model": "fake", **body})
        assert message.startswith("model: 'fake' was not trained for embeddings")


async def test_embeddings_come_from_a_model_for_them(make_application) -> None:
    application = make_application(is_embedding=True)
    _, answer = await ask(application, "/api/embed", {"model": "fake", "input": ["a", "bc"]})
    assert (answer["prompt_eval_count"], len(answer["embeddings"])) == (3, 2)
    assert answer["embeddings"][0] == pytest.approx([0.6, 0.0, 0.8])
    _, answer = await ask(application, "/api/embed", {"model": "fake", "input": "a", "dimensions": 1})
    assert answer["embeddings"] == [[1.0]]
    _, answer = await ask(application, "/api/embeddings", {"model": "fake", "prompt": "abc"})
    assert answer["embedding"] == pytest.approx([0.6, 0.0, 0.8])


async def test_a_stream_that_fails_ends_with_an_error(application, engine) -> None:
    engine.fail_at = 2
    _, lines = await ask(application, "/api/chat", BODY)
    assert set(lines[-1]) == {"error"}


async def test_a_missing_key_has_ollamas_form(make_application) -> None:
    application = make_application(api_key="secret")
    status, answer = await ask(application, "/api/chat", BODY)
    assert (status, set(answer)) == (401, {"error"})
    headers = {"Authorization": "Bearer secret"}
    assert (await ask(application, "/api/chat", BODY, headers=headers))[0] == 200


async def test_the_ollama_client_reads_everything(application, engine, serve) -> None:
    engine.chat_template = THINKS
    client = ollama.AsyncClient(host=await serve(application))
    engine.answer = pieces(f"<think>Hm.</think>Look: {CALL}")
    request: dict[str, Any] = {"model": "fake", "messages": USER, "tools": [TOOL], "think": True}
    whole = await client.chat(**request)
    assert (whole.message.thinking, whole.message.content, whole.done_reason) == ("Hm.", "Look: ", "stop")
    assert whole.message.tool_calls[0].function.arguments == {"a": 1}
    parts = [part async for part in await client.chat(**request, stream=True)]
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == ["add"]
    assert parts[-1].eval_count == len(engine.answer)
    engine.answer = list(ANSWER)
    assert (await client.generate("fake:latest", "Hi", options={"num_predict": 2})).done_reason == "length"
    text = [part.response async for part in await client.generate("fake", "Hi", stream=True)]
    assert "".join(text) == "".join(ANSWER)
    models = (await client.list()).models
    assert [model.model for model in models] == ["fake:latest"]
    assert (await client.ps()).models[0].context_length == engine.context_length
    shown = await client.show("fake")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["general.architecture"] == "fake"
    with pytest.raises(ollama.ResponseError, match="does not exist here"):
        await client.chat(**{**request, "model": "other"})
    with pytest.raises(ollama.ResponseError, match="was not trained for embeddings"):
        await client.embed("fake", "x")


async def test_the_version_is_that_of_ollamas_api(application) -> None:
    response = await application.test_client().get("/api/version")
    assert set(msgspec.json.decode(await response.get_data())) == {"version"}


def test_every_client_option_is_accepted_or_refused() -> None:
    from ollama import Options as ClientOptions

    from app.apis.ollama.requests import Options
    from app.server.known_fields import KNOWN, NO_EFFECT

    assert set(ClientOptions.model_fields) - set(Options.__struct_fields__) <= set(KNOWN) | set(NO_EFFECT)


@pytest.mark.parametrize(("truncate", "kept"), [(True, -1), (False, None), (None, None)])
async def test_an_input_to_embed_is_cut_where_the_request_says_so(
    make_application: Callable[..., Troupe], truncate: bool | None, kept: int | None
) -> None:
    application = make_application(is_embedding=True)
    engine: Any = application.engine
    body = {"model": "fake", "input": "x"} | ({} if truncate is None else {"truncate": truncate})
    response = await application.test_client().post("/api/embed", json=body)
    assert (response.status_code, engine.requests[-1]["truncate"]) == (200, kept)
