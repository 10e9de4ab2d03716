"""``tool_choice`` of chat requests: which tools an answer may or must call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.options import Arguments
from actors.protocol.requests import InvalidRequest
from app.apis.openai.tool_schemas import closed
from app.application import create_app
from tests.kits.app_requests import BODY, post
from tests.kits.fake_engine import FakeEngine

NAMES = ("get_weather", "add")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "title": name}}} for name in NAMES
]
ADD = {"type": "function", "function": {"name": "add"}}
JSON_CALL = ['[{"name": "add", "arguments"', ': {"a": 1}}]']


def served(**options: Any) -> tuple[Any, FakeEngine]:
    arguments = Arguments(model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, **options)
    engine = FakeEngine(arguments)
    return create_app(arguments, engine), engine


async def choice(application: Any, **fields: Any) -> dict[str, Any]:
    response, data = await post(application, {**BODY, "tools": TOOLS, **fields})
    assert response.status_code == 200, data
    found: dict[str, Any] = msgspec.json.decode(data)["choices"][0]
    return found


@pytest.mark.parametrize("given", ["required", "any", ADD, {"type": "function", "name": "add"}])
async def test_a_forced_call_is_constrained_in_the_models_format(given: object) -> None:
    application, engine = served()
    engine.answer = ['<tool_call>\n{"name": "add", "arguments": {', '"a": 1}}\n</tool_call>']
    [call] = (await choice(application, tool_choice=given))["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    grammar = engine.requests[-1]["params"].grammar
    assert grammar.kind == "ebnf"
    assert ('"title":"get_weather"' in grammar.text) == isinstance(given, str)
    assert (")*" in grammar.text) == isinstance(given, str)
    await choice(application, tool_choice=given, parallel_tool_calls=False)
    assert ")*" not in engine.requests[-1]["params"].grammar.text


@pytest.mark.parametrize("options", [{"grammar_backend": "xgrammar"}, {"tool_call_parser": "passthrough"}])
async def test_a_forced_call_is_json_where_the_format_is_not(options: dict[str, Any]) -> None:
    application, engine = served(**options)
    engine.answer = JSON_CALL
    answer = await choice(application, tool_choice="required", response_format={"type": "json_object"})
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    grammar = engine.requests[-1]["params"].grammar
    assert (grammar.kind, msgspec.json.decode(grammar.text)["minItems"]) == ("json_schema", 1)
    assert (grammar.whitespace is None) == ("grammar_backend" in options)  # xgrammar takes no pattern


@pytest.mark.parametrize("choice", ["required", ADD])
async def test_tools_are_checked_before_a_call_is_forced(choice: object) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    application, _ = served(tool_call_parser="glm45")
    response, data = await post(application, {**BODY, "tools": [tool], "tool_choice": choice})
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters")


async def test_allowed_tools_are_the_only_ones_that_may_be_called() -> None:
    application, engine = served()
    engine.answer = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in NAMES]
    allowed = {"mode": "auto", "tools": [ADD]}
    message = (await choice(application, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert engine.requests[-1]["params"].grammar is None
    assert len(engine.requests[-1]["prompt"].tools) == 2
    await choice(application, tool_choice={"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "required"}})
    assert "get_weather" not in engine.requests[-1]["params"].grammar.text


STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]


@pytest.mark.parametrize("parser", ["hermes", "glm45", "pythonic", "kimi_k2"])
async def test_strict_tools_constrain_calls_but_force_none(parser: str) -> None:
    application, engine = served(tool_call_parser=parser)
    await choice(application, tools=STRICT)
    grammar = engine.requests[-1]["params"].grammar
    assert grammar.kind == "ebnf"
    assert all(name in grammar.text for name in NAMES)
    await choice(application)
    assert engine.requests[-1]["params"].grammar is None


async def test_a_call_ends_an_open_thought_where_no_grammar_follows_it() -> None:
    application, engine = served(tool_call_parser="glm45", reasoning_parser="glm45")
    call = "<tool_call>add\n</tool_call>"
    engine.answer = ["<think>Hm", call, "</think>Done."]
    for tools, calls, thought in ((TOOLS, 1, "Hm"), (STRICT, 0, f"Hm{call}")):
        message = (await choice(application, tools=tools))["message"]
        assert (len(message.get("tool_calls") or ()), message["reasoning_content"]) == (calls, thought)


async def test_strict_tools_of_another_backend_are_a_structural_tag() -> None:
    application, engine = served(grammar_backend="xgrammar")
    await choice(application, tools=STRICT)
    tag = msgspec.json.decode(engine.requests[-1]["params"].grammar.text)
    assert tag["triggers"] == ["<tool_call>"]
    assert [each["schema"]["title"] for each in tag["structures"]] == list(NAMES)


async def test_an_answer_beside_tools_is_a_call_or_in_its_form() -> None:
    application, engine = served()
    schema = {"type": "object", "title": "form"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await choice(application, response_format=form)
    grammar = engine.requests[-1]["params"].grammar
    assert grammar.kind == "ebnf"
    assert all(name in grammar.text for name in (*NAMES, '"title":"form"'))
    await choice(application, response_format=form, tool_choice="none")
    assert engine.requests[-1]["params"].grammar.kind == "json_schema"
    engine.stream_error, engine.fail_at = InvalidRequest("x", param="grammar"), 0
    _, data = await post(application, {**BODY, "tools": TOOLS, "response_format": form})
    assert msgspec.json.decode(data)["error"]["param"] == "response_format"


@pytest.mark.parametrize("given", ["required", "auto"])
async def test_keywords_with_null_are_omitted(given: str) -> None:
    parameters = {
        "type": "object",
        "title": None,
        "properties": {"a": {"anyOf": [{"const": None}, {"type": "string", "pattern": None}]}, "b": {"items": None}},
        "required": None,
    }
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    application, engine = served()
    await choice(application, tools=[tool], tool_choice=given)
    text = engine.requests[-1]["params"].grammar.text
    assert '"properties":{"a":{"anyOf":[{"const":null},{"type":"string"}]},"b":{}}' in text
    assert "required" not in text


@pytest.mark.parametrize("given", ["required", "auto"])
async def test_calls_have_no_arguments_that_the_tool_does_not_name(given: str) -> None:
    inner = {"type": "object", "properties": {"x": {"type": "null"}}}
    properties = {"a": {"type": "array", "items": inner}, "b": inner | {"additionalProperties": {"type": "null"}}}
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": properties}}
    application, engine = served()
    await choice(application, tools=[{"type": "function", "function": tool}], tool_choice=given)
    text = engine.requests[-1]["params"].grammar.text
    shut = '"properties":{"x":{"type":"null"}},"additionalProperties":false'
    assert text.count('"additionalProperties":false') == 2
    assert shut in text
    assert '"properties":{"x":{"type":"null"}},"additionalProperties":{"type":"null"}' in text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "patternProperties": {"b": {}}},
        {"anyOf": [{"properties": {"a": {}}}]},
        True,
    ],
    ids=str,
)
def test_schemas_that_speak_of_other_properties_stay_open(schema: object) -> None:
    assert closed(schema) == schema


FORMAT = {"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}}
IRI = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": FORMAT}}]


@pytest.mark.parametrize(
    ("options", "fields", "param", "message"),
    [
        ({"grammar_backend": "none"}, {"tools": STRICT}, "tools", "--grammar-backend none"),
        ({"tool_call_parser": "off"}, {"tools": STRICT}, "tools", "--tool-call-parser"),
        ({"tool_call_parser": "passthrough"}, {"tools": STRICT}, "tools", "--tool-call-parser"),
        ({"grammar_backend": "xgrammar", "tool_call_parser": "glm45"}, {"tools": STRICT}, "tools", "llguidance"),
        ({"tool_call_parser": "glm45"}, {"tools": IRI}, "tools", "format iri"),
        ({}, {"ebnf": 'root ::= "x"'}, "ebnf", "the form ebnf"),
        ({"grammar_backend": "xgrammar"}, {"regex": "a"}, "regex", "llguidance"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_with_the_reason(
    options: dict[str, Any], fields: dict[str, Any], param: str, message: str
) -> None:
    response, data = await post(served(**options)[0], {**BODY, "tools": TOOLS, **fields})
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert message in error["message"]


async def test_no_tool_is_called_or_shown_with_none() -> None:
    application, engine = served()
    engine.answer = ["<tool_call>"]
    assert (await choice(application, tool_choice="none"))["message"]["content"] == "<tool_call>"
    assert engine.requests[-1]["prompt"].tools is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("sometimes", "tool_choice"),
        ({"type": "function", "function": {"name": "rm"}}, "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [ADD]}}, "tool_choice.allowed_tools.mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ADD, {}]}},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
    ],
)
async def test_a_wrong_choice_is_named(given: object, named: str) -> None:
    response, data = await post(served()[0], {**BODY, "tools": TOOLS, "tool_choice": given})
    assert (response.status_code, msgspec.json.decode(data)["error"]["param"]) == (400, named)


async def test_a_choice_needs_tools() -> None:
    for given in ("auto", "required", ADD):
        response, data = await post(served()[0], {**BODY, "tool_choice": given})
        assert (response.status_code, msgspec.json.decode(data)["error"]["param"]) == (400, "tool_choice")
