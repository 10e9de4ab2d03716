"""Every field of a request reaches the engine from every API, under whichever of its names, and none another's."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import msgspec
import pytest

from actors.options import Arguments
from actors.protocol.requests import LIMITS, Chat, SamplingParams
from app.apis.openai.parameters import chat_params, chat_prompt, completion_params, label_of, salt_of
from app.apis.openai.requests import ChatRequest, CompletionRequest
from app.apis.openai.tool_schemas import find_schema_error
from app.apis.sglang.requests import GenerateRequest, NativeSampling, batch_of
from app.route_table import ROUTES
from app.server.errors import ApiError
from app.server.field_screen import FieldScreen
from app.server.known_fields import KNOWN

SHARED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.4,
    "top_k": 9,
    "min_p": 0.2,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.6,
    "logit_bias": {5: -1.5},
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "speculative": False,
    "speculative_num_draft_tokens": 6,
}
OPENAI = SHARED | {
    "max_tokens": 50,
    "min_tokens": 2,
    "seed": 11,
    "include_stop_str_in_output": True,
    "bad_words": ["c"],
    "allowed_token_ids": [1, 2, 3],
    "prompt_logprobs": 4,
}
EXPECTED = SamplingParams(
    max_tokens=50,
    min_tokens=2,
    temperature=0.5,
    top_p=0.4,
    top_k=9,
    min_p=0.2,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=-0.6,
    logit_bias={5: -1.5},
    seed=11,
    n=3,
    stop=("a", "b"),
    stop_token_ids=(7,),
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
    logprobs=8,
    prompt_logprobs=4,
    bad_words=("c",),
    allowed_token_ids=(1, 2, 3),
    speculative=False,
    speculative_num_draft_tokens=6,
)


def chat(**fields: Any) -> SamplingParams:
    return chat_params(msgspec.convert({"messages": [{"role": "user", "content": "a"}], **fields}, ChatRequest))


def completion(**fields: Any) -> SamplingParams:
    return completion_params(msgspec.convert({"prompt": "a", **fields}, CompletionRequest))


def native(sampling: dict[str, Any], **fields: Any) -> SamplingParams:
    body = msgspec.convert({"text": "a", "sampling_params": sampling, **fields}, GenerateRequest)
    return batch_of(body).items[0].params


def test_each_field_is_itself() -> None:
    assert chat(**OPENAI, logprobs=True, top_logprobs=8) == EXPECTED
    assert completion(**OPENAI, logprobs=8) == EXPECTED
    sampling = {**SHARED, "max_new_tokens": 50, "min_new_tokens": 2, "sampling_seed": 11}
    scored = native({**sampling, "no_stop_trim": True}, return_logprob=True, top_logprobs_num=8, logprob_start_len=0)
    less = {"bad_words": (), "allowed_token_ids": None, "prompt_logprobs": 8}  # SGLang's has no such fields
    assert scored == msgspec.structs.replace(EXPECTED, **less)


def test_what_is_left_out_is_left_to_the_engine() -> None:
    assert chat() == SamplingParams()
    assert completion() == SamplingParams(default_max_tokens=16)
    assert native({}) == SamplingParams(default_max_tokens=128)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"stop": "word"}, {"stop": ("word",)}),
        ({"logprobs": True}, {"logprobs": 0}),
    ],
)
def test_other_spellings(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(**fields) == SamplingParams(**expected)


def test_scores_of_a_prompt_are_requested_by_echo_or_by_where_they_begin() -> None:
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert completion(echo=True).prompt_logprobs is completion(logprobs=3).prompt_logprobs is None
    for start, expected in ((None, None), (-1, None), (0, 2), (4, 2)):
        assert native({}, return_logprob=True, top_logprobs_num=2, logprob_start_len=start).prompt_logprobs == expected
    assert native({}, top_logprobs_num=2, logprob_start_len=0).logprobs is None


def conversation(messages: list[dict[str, Any]], **fields: Any) -> Chat:
    return chat_prompt(msgspec.convert({"messages": messages, **fields}, ChatRequest), Arguments(model_path="m"))


def test_a_template_is_given_all_of_a_conversation() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "What is it?", "name": "eve"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": call}], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "refusal": "no"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters, "strict": True}}]
    chat = conversation(messages, tools=tools, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert chat == Chat(
        messages=[
            {"role": "system", "content": "one\ntwo"},
            {"role": "user", "content": "What is it?", "name": "eve"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
            {"role": "assistant", "content": "no"},
        ],
        tools=tools,
        template_kwargs={"enable_thinking": False, "reasoning_effort": "low"},
    )


def test_what_is_free_of_form_is_bounded_all_the_same() -> None:
    messages, long = [{"role": "user", "content": "a"}], "x" * max(LIMITS.schema_bytes, LIMITS.template_kwargs_bytes)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": long}}}
    for field, fields in (
        ("tools[1].function.parameters", {"tools": [{"type": "function", "function": {"name": "f"}}, tool]}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": long}}),
    ):
        with pytest.raises(ApiError, match="bytes as JSON") as refused:
            conversation(messages, **fields)
        assert refused.value.param == field


def test_a_continued_message_gets_no_generation_prompt() -> None:
    messages = [{"role": "assistant", "content": "Once"}]

    def reported(**fields: Any) -> tuple[bool, bool]:
        chat = conversation(messages, **fields)
        return chat.add_generation_prompt, chat.continue_final_message

    assert reported() == reported(add_generation_prompt=True) == (True, False)
    assert reported(add_generation_prompt=False) == (False, False)
    assert reported(continue_final_message=True) == (False, True)
    assert reported(continue_final_message=True, add_generation_prompt=False) == (False, True)
    with pytest.raises(ApiError, match="contradicts"):
        reported(continue_final_message=True, add_generation_prompt=True)


def test_a_stream_reports_no_scores_of_its_prompt() -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError, match="not in a stream"):
            ask(stream=True, prompt_logprobs=1)


def test_names_of_requests_and_salts() -> None:
    def body(**fields: Any) -> CompletionRequest:
        return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)

    assert label_of(body(rid="r", request_id="q")) == "r"
    assert label_of(body(request_id="q")) == "q"
    assert salt_of(body(cache_salt="s")) == "s"
    assert salt_of(body(extra_key="k")) == "k"
    assert len({salt_of(body(cache_salt=a, extra_key=b)) for a, b in (("s", "k"), ("k", "s"), ("s", "s"))}) == 3
    assert label_of(body()) is salt_of(body()) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"text": "a"}),
    ],
)
async def test_what_is_not_of_sampling_reaches_the_engine_too(
    application: Any, path: str, body: dict[str, Any]
) -> None:
    client = application.test_client()
    for fields in ({"priority": 7, "rid": "mine", "cache_salt": "s"}, {"extra_key": "k"}, {}):
        assert (await client.post(path, json={**body, **fields})).status_code == 200
    first, second, last = application.engine.requests
    assert (first["priority"], first["request_id"], first["cache_salt"]) == (7, "mine", "s")
    assert (second["priority"], second["cache_salt"]) == (0, "k")
    assert last["cache_salt"] is None
    assert len({first["request_id"], second["request_id"], last["request_id"]}) == 3


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BODIES = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT_BODY, "/generate": {"text": "a"}}


async def answer(application: Any, path: str, **fields: Any) -> tuple[int, dict[str, Any], str | None]:
    """The status, the answer and its header of ignored fields."""
    response = await application.test_client().post(path, json={**BODIES[path], **fields})
    return response.status_code, await response.get_json(), response.headers.get("x-ignored-fields")


@pytest.mark.parametrize(
    ("path", "fields", "use"),
    [
        ("/v1/chat/completions", {"max_new_tokens": 5}, "max_tokens"),
        ("/v1/chat/completions", {"num_predict": 5}, "max_tokens"),
        ("/v1/completions", {"max_completion_tokens": 5}, "max_tokens"),
        ("/v1/completions", {"n_probs": 5}, "logprobs"),
        ("/v1/chat/completions", {"n_probs": 5}, "top_logprobs"),
        ("/v1/chat/completions", {"stop_sequences": ["a"]}, "stop"),
        ("/v1/chat/completions", {"repeat_penalty": 1.1}, "repetition_penalty"),
        ("/v1/chat/completions", {"prompt": "a"}, "messages"),
        ("/generate", {"max_tokens": 5}, "sampling_params.max_new_tokens"),
        ("/generate", {"temperature": 0}, "sampling_params.temperature"),
        ("/generate", {"sampling_params": {"max_tokens": 5}}, "sampling_params.max_new_tokens"),
        ("/generate", {"sampling_params": {"seed": 5}}, "sampling_params.sampling_seed"),
        ("/generate", {"sampling_params": {"return_logprob": True}}, "return_logprob"),
        ("/generate", {"prompt": "a"}, "text"),
    ],
)
async def test_another_apis_name_is_refused_with_ours(
    application: Any, path: str, fields: dict[str, Any], use: str
) -> None:
    status, body, _ = await answer(application, path, **fields)
    assert status == 400
    assert f"use {use}," in body["error"]["message"]
    name = next(iter(fields))
    inner = fields[name]
    assert body["error"]["param"] == (f"{name}.{next(iter(inner))}" if name == "sampling_params" else name)
    assert not application.engine.requests


async def test_every_known_field_is_refused_on_every_path(application: Any) -> None:
    for route in application.service.table.routes:
        if route.path not in BODIES:
            continue
        own = {field.encode_name for field in msgspec.structs.fields(route.body)}
        for name in sorted(KNOWN.keys() - own):
            status, body, _ = await answer(application, route.path, **{name: {"anything": [1]}})
            assert (status, body["error"]["param"]) == (400, name)
            assert body["error"]["message"].isprintable()
            status, _, ignored = await answer(application, route.path, **{name: None})
            assert (status, ignored) == (200, None), name


@pytest.mark.parametrize(
    ("path", "fields", "owner"),
    [
        ("/v1/completions", {"tools": [{"type": "function"}]}, "/v1/chat/completions"),
        ("/v1/chat/completions", {"echo": True}, "/v1/completions"),
        ("/generate", {"bad_words": ["a"]}, "/v1/chat/completions"),
        ("/v1/completions", {"sampling_params": {"n": 2}}, "/generate"),
    ],
)
async def test_a_field_of_another_path_is_refused_with_that_path(
    application: Any, path: str, fields: dict[str, Any], owner: str
) -> None:
    status, body, _ = await answer(application, path, **fields)
    assert (status, body["error"]["param"]) == (400, next(iter(fields)))
    assert f"only {owner} takes it" in body["error"]["message"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("max_token", "max_tokens"),
        ("freqency_penalty", "frequency_penalty"),
        ("reponse_format", "response_format"),
    ],
)
async def test_a_misspelt_field_is_refused_with_its_spelling(application: Any, name: str, meant: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, body, _ = await answer(application, path, **{name: 1})
        assert (status, body["error"]["param"]) == (400, name)
        assert f"the most similar is {meant}." in body["error"]["message"]
    status, body, _ = await answer(application, "/v1/chat/completions", **{name: None})
    assert status == 200


async def test_a_misspelt_sampling_field_is_refused_with_its_place(application: Any) -> None:
    status, body, _ = await answer(application, "/generate", sampling_params={"temprature": 1})
    assert (status, body["error"]["param"]) == (400, "sampling_params.temprature")
    assert "the most similar is temperature." in body["error"]["message"]


CLIENT_FIELDS = [
    "api_key",
    "base_url",
    "cache",
    "caching",
    "chat_id",
    "custom_llm_provider",
    "extra_body",
    "id",
    "mode",
    "models",
    "num_retries",
    "provider",
    "route",
    "tags",
    "timeout",
    "title",
    "trace",
    "usage",
    "username",
]


@pytest.mark.parametrize("name", CLIENT_FIELDS)
async def test_a_field_of_a_client_is_no_misspelling(application: Any, name: str) -> None:
    status, _, ignored = await answer(application, "/v1/chat/completions", **{name: {"a": 1}})
    assert (status, ignored) == (200, name)


async def test_ignored_fields_are_named_to_the_client_and_in_the_log(
    application: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "troupe.http")
    fields = {"wibble": 1, "we\r\nird": 2, "store": True, "priority": 3, "user": "u", "verbosity": "medium"}
    status, _, ignored = await answer(application, "/v1/chat/completions", **fields)
    assert (status, ignored) == (200, "priority, store, wibble, and 1 more")
    event = next(record.msg for record in caplog.records if "POST" in record.getMessage())
    assert event.fields["ignored"] == ignored
    many = {f"wibble{number}": 1 for number in range(200)}
    _, _, ignored = await answer(application, "/v1/chat/completions", **many)
    assert ignored is not None
    assert len(ignored) < 1100
    assert ignored.endswith("and 184 more")
    _, _, ignored = await answer(application, "/generate", sampling_params={"wibble": 1})
    assert ignored == "sampling_params.wibble"


async def test_a_priority_is_ignored_only_without_its_option(make_application: Any) -> None:
    application = make_application(enable_priority_scheduling=True)
    status, _, ignored = await answer(application, "/v1/chat/completions", priority=3)
    assert (status, ignored, application.engine.requests[0]["priority"]) == (200, None, 3)


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("reasoning_effort", "low", "banana"),
        ("service_tier", "flex", "banana"),
        ("verbosity", "high", "banana"),
        ("store", True, "yes"),
        ("user", "me", 5),
        ("metadata", {"a": "b"}, {"a": 5}),
        ("metadata", {str(number): "x" * 512 for number in range(16)}, {str(number): "" for number in range(17)}),
        ("metadata", {"x" * 64: ""}, {"x" * 65: ""}),
        ("metadata", {"a": "x" * 512}, {"a": "x" * 513}),
    ],
)
async def test_a_field_without_effect_is_checked_all_the_same(
    application: Any, field: str, taken: object, refused: object
) -> None:
    assert (await answer(application, "/v1/chat/completions", **{field: taken}))[0] == 200
    status, body, _ = await answer(application, "/v1/chat/completions", **{field: refused})
    assert (status, body["error"]["param"]) == (400, field)


async def test_a_request_is_aborted_by_the_rid_of_a_chat(application: Any, engine: Any, until: Any) -> None:
    engine.gate = asyncio.Event()
    posted = asyncio.create_task(answer(application, "/v1/chat/completions", rid="mine"))
    await until(lambda: engine.open)
    await application.test_client().post("/abort_request", json={"rid": "mine"})
    status, body, _ = await posted
    assert (status, body["error"]["code"]) == (499, "request_aborted")


@pytest.mark.parametrize(
    ("parameters", "mistake"),
    [
        ({"type": "object"}, None),
        ({}, None),
        ({"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x"]}}, "required": ["a"]}, None),
        ({"type": "object", "properties": {"a": True}, "additionalProperties": False, "title": None}, None),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}}, "$defs": {"b": {}}}, None),
        ({"type": "object", "properties": {"enum": {"enum": [1]}, "type": {"type": "array", "items": {}}}}, None),
        ({"properties": {}}, ".type"),
        ({"type": "array", "items": {}}, ".type"),
        ({"type": "object", "properties": []}, ".properties"),
        ({"type": "object", "properties": {"a": "string"}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, ".properties.a.type"),
        ({"type": "object", "properties": {"a": {"type": "string", "required": True}}}, ".properties.a.required"),
        ({"type": "object", "required": "a"}, ".required"),
        ({"type": "object", "properties": {"a": {"enum": []}}}, ".properties.a.enum"),
        ({"type": "object", "properties": {"a": {"anyOf": {}}}}, ".properties.a.anyOf"),
        ({"type": "object", "properties": {"a": {"items": [{"type": 5}]}}}, ".properties.a.items[0].type"),
        ({"type": "object", "properties": {"a": {"maxLength": -1}}}, ".properties.a.maxLength"),
    ],
)
def test_a_tools_parameters_are_a_schema_of_an_object(parameters: dict[str, Any], mistake: str | None) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    if mistake is None:
        assert conversation([{"role": "user", "content": "a"}], tools=tools).tools == tools
        return
    with pytest.raises(ApiError) as refused:
        conversation([{"role": "user", "content": "a"}], tools=tools)
    assert refused.value.param == f"tools[0].function.parameters{mistake}"


def test_a_long_property_name_is_not_repeated_for_each_schema_below_it() -> None:
    schema = {"type": "object", "properties": {"x" * 30_000: {"anyOf": [{"type": "null"}] * 2_000}}}
    tracemalloc.start()
    try:
        assert find_schema_error(schema) is None
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_the_size_of_all_tools_is_checked_before_each_of_them() -> None:
    function = {"name": "not a name", "description": "x" * LIMITS.tools_bytes}
    with pytest.raises(ApiError) as refused:
        conversation([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": function}])
    assert (refused.value.param, refused.value.code) == ("tools", "too_large")


def test_names_of_one_request_are_compared_at_most_16_times(monkeypatch: Any) -> None:
    compared: list[str] = []

    def compare(name: str, *_: object, **__: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("app.server.field_screen.difflib.get_close_matches", compare)
    route = next(route for route in ROUTES if route.path == "/generate")
    screen, seen = FieldScreen(ROUTES, lambda name: None), set[str]()
    for number in range(100):
        fields = {f"{letter}{number:09}": msgspec.Raw(b"1") for letter in "qwx"}
        ignored = screen.left(fields, NativeSampling, route, "sampling_params", seen)
        assert ignored == [f"sampling_params.{name}" for name in fields]
    assert len(compared) == 16


def test_arguments_of_a_past_call_are_a_json_object() -> None:
    for given, expected in (("", {}), ("null", {}), ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1})):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        message = conversation([{"role": "assistant", "tool_calls": [call]}]).messages[0]
        assert message["tool_calls"][0]["function"]["arguments"] == expected
    for bad in ("{", "[1]", "5"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": bad}}
        with pytest.raises(ApiError, match="must be a JSON object"):
            conversation([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(("path", "field"), [("/generate", "text"), ("/v1/completions", "prompt")])
async def test_a_thousand_prompts_are_one_request(application: Any, path: str, field: str) -> None:
    status, body, _ = await answer(application, path, **{field: ["a"] * 1000})
    assert status == 200
    assert len(body if path == "/generate" else body["choices"]) == 1000
    status, body, _ = await answer(application, path, **{field: ["a"] * 2049})
    assert (status, body["error"]["param"]) == (400, field)
    assert "2048" in body["error"]["message"]
